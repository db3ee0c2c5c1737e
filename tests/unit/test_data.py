"""`megatron-muon data prepare`: ids, files, all that can be wrong with the input, and with a run of
the data.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_muon import cli
from megatron_muon.errors import UserError
from megatron_muon.megatron.data import corpus, tokenizers
from megatron_muon.megatron.data.corpus import (
    STDLIB,
    CorpusSettings,
    check_vocabulary,
    cut,
    find_sources,
    prepare,
)
from megatron_muon.megatron.data.tokenizers import TokenizerSpec
from megatron_muon.megatron.flags.command_line import _check_split, check_vocabularies, require_data
from tests.support.cli import words


@pytest.fixture
def tree(tmp_path):
    """A directory with two documents and one of everything that is to be passed over."""
    root = tmp_path / "tree"
    for directory in ["b", "a", "__pycache__", ".git", "site-packages", "dist-packages"]:
        (root / directory).mkdir(parents=True)
    (root / "b" / "two.py").write_text("second = 'ü'\n", "utf-8")
    (root / "a" / "one.py").write_text("first = 1\r\n", "utf-8", newline="")
    never = "__pycache__/x.py .git/x.py site-packages/x.py dist-packages/x.py .hidden.py"
    for skipped in never.split():
        (root / skipped).write_text("never")
    (root / "binary.py").write_bytes(b"\x7fELF\0\0")
    (root / "latin.py").write_bytes("naïve".encode("latin-1"))
    (root / "empty.py").write_bytes(b"")
    (root / "notes.txt").write_text("a note")
    return root


def texts(prefix):
    """Reads the data back through megatron-core."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    found = [dataset[index] for index in range(len(dataset))]
    assert all((ids.dtype, ids[-1]) == (np.uint16, 256) for ids in found)
    return [
        bytes(
            ids[:-1].astype(np.uint8),
        ).decode()
        for ids in found
    ]


def digest(prefix):
    return [Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx")]


def command(*argv, status=0):
    """`megatron-muon data prepare`."""
    assert cli.main(["data", "prepare", *map(str, argv)]) == status


def test_training_flags_build_a_tokenizer_with_the_same_vocabulary_and_end_of_document():
    """Megatron's command line cannot name its byte-level tokenizer; NullTokenizer stands in
    for it.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    spec = TokenizerSpec()
    parser = argparse.ArgumentParser()
    _add_tokenizer_args(parser)
    args = parser.parse_args(spec.in_training().flags())
    args.pad_vocab_size = False
    in_training, in_data = build_tokenizer(args), tokenizers.build(spec)
    assert in_data.vocab_size == in_training.vocab_size == 257
    assert in_data.eod == in_training.eod == 256
    assert tokenizers.encode(in_data, "one.txt", "aü").tolist() == [*"aü".encode(), 256]


# What is written


def test_prepares_a_tree_in_sorted_order_and_says_how_to_train_on_it(tree, tmp_path, capsys):
    prefix = tmp_path / "out" / "corpus"
    command("--input", tree, "--output", prefix)
    out = capsys.readouterr().out
    assert (
        f"3 documents, {11 + 14 + 6 + 3} tokens; skipped: 2 files that are not UTF-8 text, 1 empty"
        " files" in out
    )
    assert (
        f"train with: --data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 257" in out
    )
    assert texts(prefix) == ["first = 1\r\n", "second = 'ü'\n", "a note"]
    assert corpus.OutputPaths(prefix).read_manifest().vocab_size == 257
    # each once
    sources = find_sources([tree / "notes.txt", tree, tree / "a" / "one.py"])
    names = "notes.txt a/one.py b/two.py binary.py empty.py latin.py"
    assert [label for label, _ in sources] == names.split()


def test_the_same_input_gives_the_same_bytes(tree, tmp_path, monkeypatch):
    """Whatever the order in which the file system lists a directory."""
    prepare([tree], tmp_path / "first")
    walk = Path.walk

    def backwards(*args, **kwargs):
        for directory, subdirectories, names in walk(*args, **kwargs):
            subdirectories.reverse()
            yield directory, subdirectories, names[::-1]

    monkeypatch.setattr(Path, "walk", backwards)
    prepare([tree], tmp_path / "second")
    assert digest(tmp_path / "first") == digest(tmp_path / "second")


def test_jsonl_documents_are_lines_and_a_broken_one_is_named(tmp_path):
    lines = [{"content": "one", "id": 1}, {"content": ""}, {"content": "two\nlines"}]
    file = tmp_path / "part.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert prepare([file], tmp_path / "out", CorpusSettings(json_key="content")).documents == 2
    assert texts(tmp_path / "out") == ["one", "two\nlines"]
    for line in ("{", '{"body": "x"}', '{"content": 5}'):
        file.write_text('{"content": "fine"}\n' + line + "\n")
        with pytest.raises(UserError, match=r"part\.jsonl:2: must be a JSON object .* 'content'"):
            prepare([file], tmp_path / "broken", CorpusSettings(json_key="content"))
    assert [path.name for path in tmp_path.glob("*broken*")] == [".broken.lock"]


@pytest.mark.parametrize("border", ["\r\n \r\n", "\n"], ids=["paragraphs", "lines alone"])
def test_one_text_is_cut_so_that_a_split_leaves_documents_for_validation(tmp_path, border, capsys):
    """`data prepare --input book.txt`, then `train`: refused, no document for validation."""
    book = "".join(f"Paragraph {number}, a line\nand another.{border}" for number in range(1000))
    (tmp_path / "book.txt").write_text(book, "utf-8", newline="")
    command("--input", tmp_path / "book.txt", "--output", tmp_path / "out")
    assert "100 documents" in capsys.readouterr().out
    pieces = texts(tmp_path / "out")
    assert "".join(pieces) == book
    assert all(len(piece) < 2 * len(book) / 100 and piece.endswith(border) for piece in pieces)
    _check_split(str(tmp_path / "out"), "98,2,0", needs_validation=True)
    # negative control: documents are not cut otherwise
    (tmp_path / "letter.txt").write_text("Another document.")
    assert prepare(list(tmp_path.glob("*.txt")), tmp_path / "two").documents == 2
    assert cut("one\ntwo\n\n  three\n") == ["one\n", "two\n\n", "  three\n"]


# Doing it again


def test_data_that_is_there_is_not_replaced(tree, tmp_path):
    prepare([tree], tmp_path / "out")
    before = digest(tmp_path / "out")
    for settings in (CorpusSettings(), CorpusSettings(stdlib=STDLIB)):
        with pytest.raises(UserError, match=r"out\.bin exists already; remove it"):
            prepare([tree], tmp_path / "out", settings)
    assert digest(tmp_path / "out") == before


def test_data_that_was_trained_on_can_be_prepared_again(tree, tmp_path):
    """A second quickstart was refused: megatron-core's indices had made a folder of the prefix
    data/stdlib.

    And other documents under an old prefix were read by the old indices, which their key does not
    tell apart.
    """
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from megatron_muon.megatron.model import gpt

    def samples(prefix):
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=4,
            blend=([str(prefix)], None),
            split="100,0,0",
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        builder = gpt.BlendedMegatronDatasetBuilder(gpt.GPTDataset, [5, 0, 0], lambda: True, config)
        return [sample["tokens"].tolist() for sample in builder.build()[0]]

    tokenizer = tokenizers.build(TokenizerSpec().in_training())
    prefix = tmp_path / "data" / "mine"
    prepare([tree / "notes.txt"], prefix)
    samples(prefix)
    names = words("mine.bin mine.cache mine.idx mine.prepared.json")
    assert {path.name for path in prefix.parent.glob("[!.]*")} == set(names)
    (tree / "notes.txt").write_text("\n".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    mine = prefix.parent / "mine.cache" / "mine.txt"
    mine.touch()
    prefix.with_name("mine.bin").unlink()
    prepare([tree / "notes.txt"], prefix)
    assert mine.exists()  # this tool did not write it
    prepare([tree / "notes.txt"], tmp_path / "fresh")
    assert samples(prefix) == samples(tmp_path / "fresh")


def test_an_interrupted_run_leaves_nothing(tree, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "encode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare([tree], tmp_path / "out")
    assert [path.name for path in tmp_path.glob("*out*")] == [".out.lock"]


# What a user can get wrong


def tokenizer(*spec):
    return CorpusSettings(tokenizer=TokenizerSpec(*spec))


@pytest.mark.parametrize(
    ("inputs", "output", "settings", "message"),
    [
        ("", "out", tokenizer("ByteLevelTokenizer", "gpt2"), "has no --tokenizer-model; leave it"),
        ("", "out", tokenizer("TikTokenizer", "/nowhere"), "--tokenizer-type TikTokenizer"),
        ("nowhere", "out", CorpusSettings(), "cannot read or write .*nowhere"),
        ("binary.py", "out", CorpusSettings(), r"no document in 1 files .*1 files that are not UT"),
        ("", "notes.txt/out", CorpusSettings(), "cannot read or write .*notes.txt"),
    ],
)
def test_wrong_inputs_outputs_and_tokenizers_are_refused(tree, inputs, output, settings, message):
    with pytest.raises(UserError, match=message):
        prepare([tree / inputs], tree / output, settings)


# The standard library, and several processes at once


def test_the_standard_library_is_python_only_and_written_once(tree, tmp_path, monkeypatch):
    """And again for another Python."""
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tree))
    output, settings = tmp_path / "stdlib", CorpusSettings(stdlib=STDLIB)
    prepare([], output, CorpusSettings(stdlib="python 3.0"))
    (tree / "a" / "one.py").write_text("first = 2\n")
    prepare([], output, settings)
    assert texts(output) == ["first = 2\n", "second = 'ü'\n"]
    monkeypatch.setattr(corpus, "_write", None)  # where another preparation would end
    prepare([], output, settings)


def test_the_lock_keeps_other_processes_out(tmp_path):
    """The story: two ranks find no corpus, and both start to write it."""
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = [sys.executable, "-c", take, str(tmp_path / ".corpus.lock")]
    with corpus.OutputPaths(tmp_path / "corpus").locked():
        assert b"BlockingIOError" in subprocess.run(other, stderr=subprocess.PIPE).stderr
    assert subprocess.run(other).returncode == 0


def test_a_tokenizer_without_its_package_says_what_to_install(monkeypatch):
    """megatron-core said: name 'AutoTokenizer' is not defined."""
    monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"HuggingFaceTokenizer needs the package transformers; type pip install tra",
    ):
        tokenizers.build(TokenizerSpec("HuggingFaceTokenizer", "gpt2"))


# A run of the data


def run(kind="NullTokenizer", *, rows=384, model=None, size=257, data=None):
    others = words(
        "mock_data skip_train split data_args_path per_split_data_args_path train_data_path"
        " valid_data_path test_data_path"
    )
    return argparse.Namespace(
        **dict.fromkeys(others),
        data_path=data,
        tokenizer_type=kind,
        tokenizer_model=model,
        vocab_size=size,
        padded_vocab_size=rows,
    )


@pytest.fixture
def text(tmp_path):
    """Bytes with 257 ids, as `data prepare` writes them."""
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    prepare([tmp_path / "text.txt"], tmp_path / "text")
    return str(tmp_path / "text")


def test_data_of_another_tokenizer_or_a_larger_vocabulary_is_refused_with_both_named(text):
    """It ended in `IndexError: index out of range in self` on every rank, or trained on
    nonsense.
    """
    check_vocabulary(text, run())
    check_vocabulary(text, run(size=300))
    with pytest.raises(
        UserError,
        match=r"text was made with ByteLevelTokenizer, .* this run has HuggingFaceT.* gpt2 ",
    ):
        check_vocabulary(text, run("HuggingFaceTokenizer", rows=50304, model="gpt2", size=None))
    with pytest.raises(
        UserError, match=r"of 257; .* --vocab-size 200 .* 256 \(padded\); .*--vocab-size 257"
    ):
        check_vocabulary(text, run(rows=256, size=200))
    with pytest.raises(UserError, match="text was made with"):
        check_vocabularies(run(rows=128, size=100, data=["0.5", "absent", "0.5", text]))
    with pytest.raises(
        UserError,
        match=r"text\.bin\.bin does not exist; give the prefix of a \.bin and an \.idx file",
    ):
        require_data(run(data=[text + ".bin"]))
    # The model's folder does not matter.
    (one, other) = (
        TokenizerSpec(
            "SentencePieceTokenizer",
            f"{at}/t.model",
        )
        for at in ("a", "/b")
    )
    assert one.kind_and_file() == other.kind_and_file() != TokenizerSpec().kind_and_file()
    # Without a manifest the ids at the beginning count.
    Path(f"{text}.prepared.json").unlink()
    check_vocabulary(text, run("HuggingFaceTokenizer", rows=50304, model="gpt2", size=None))
    with pytest.raises(
        UserError, match=r"unknown tokenizer, a vocabulary of 257; .* a model of 128 "
    ):
        check_vocabulary(text, run(rows=128, size=100))
