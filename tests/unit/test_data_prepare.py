"""`megatron-muon data prepare`: the ids, the files, and everything that can be wrong with the input."""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_muon import cli
from megatron_muon.errors import UserError
from megatron_muon.megatron.data import STDLIB, Settings, TokenizerSpec, corpus, prepare, tokenizers
from megatron_muon.megatron.data.sources import cut, find_sources
from megatron_muon.megatron.flags.arguments import _check_split


@pytest.fixture(autouse=True)
def quiet():
    """megatron-core warns about every package it does without; nobody's concern here."""
    from megatron_muon.errors import quiet_imports

    with quiet_imports():
        import megatron.core.datasets.indexed_dataset  # noqa: F401


@pytest.fixture
def tree(tmp_path):
    """A directory with two documents and one of everything that is to be passed over."""
    root = tmp_path / "tree"
    for directory in ("b", "a", "__pycache__", ".git", "site-packages", "dist-packages"):
        (root / directory).mkdir(parents=True)
    (root / "b" / "two.py").write_text("second = 'ü'\n", "utf-8")
    (root / "a" / "one.py").write_text("first = 1\r\n", "utf-8", newline="")
    for skipped in ("__pycache__/x.py", ".git/x.py", "site-packages/x.py", "dist-packages/x.py", ".hidden.py"):
        (root / skipped).write_text("never")
    (root / "binary.py").write_bytes(b"\x7fELF\0\0")
    (root / "latin.py").write_bytes("naïve".encode("latin-1"))
    (root / "empty.py").write_bytes(b"")
    (root / "notes.txt").write_text("a note")
    return root


def documents(prefix):
    """Reads the data back through megatron-core."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [dataset[index].copy() for index in range(len(dataset))]  # the arrays lie in the dataset's memory map


def texts(prefix):
    return [bytes(ids[:-1].astype(np.uint8)).decode() for ids in documents(prefix)]


def digest(prefix):
    return [hashlib.sha256(Path(f"{prefix}{end}").read_bytes()).hexdigest() for end in (".bin", ".idx")]


def leftovers(directory, prefix):
    return sorted(path.name for path in directory.iterdir() if prefix in path.name and ".lock" not in path.name)


@pytest.mark.parametrize("size", [257, 384])
def test_training_flags_build_a_tokenizer_with_the_same_vocabulary_and_end_of_document(size):
    """Megatron's command line cannot name its byte-level tokenizer; NullTokenizer stands in for it."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    spec = TokenizerSpec(vocab_size=size)
    parser = argparse.ArgumentParser()
    _add_tokenizer_args(parser)
    args = parser.parse_args(spec.in_training().flags())
    args.pad_vocab_size = False
    in_training, in_data = build_tokenizer(args), tokenizers.build(spec)
    assert in_data.vocab_size == in_training.vocab_size == size
    assert in_data.eod == in_training.eod == size - 1
    assert tokenizers.encode(spec, ("one.txt", "aü")).tolist() == [*"aü".encode(), size - 1]


# What is written


def test_prepares_a_tree_in_sorted_order(tree, tmp_path):
    prefix = tmp_path / "out" / "corpus"
    found = prepare([tree], prefix, Settings(suffixes=(".py",)))
    assert texts(prefix) == ["first = 1\r\n", "second = 'ü'\n"]
    assert all(ids[-1] == 256 for ids in documents(prefix))
    assert documents(prefix)[0].dtype == np.uint16
    assert (found.documents, found.tokens, found.vocab_size) == (2, 11 + 14 + 2, 257)
    assert found.skipped == "2 files that are not UTF-8 text, 1 empty files"
    inputs = [tree / "notes.txt", tree, tree / "a" / "one.py"]  # each once, named ones whatever their suffix
    sources = find_sources(inputs, (".py",), [tree / "latin.py"])
    assert [label for label, _ in sources] == ["notes.txt", "a/one.py", "b/two.py", "binary.py", "empty.py"]


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
    (tree / "notes.txt").write_text("another note")
    prepare([tree], tmp_path / "third")
    assert digest(tmp_path / "third") != digest(tmp_path / "first")


def test_jsonl_documents_are_lines(tmp_path):
    lines = [{"content": "one", "id": 1}, {"content": ""}, {"content": "two\nlines"}]
    file = tmp_path / "part.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert prepare([file], tmp_path / "out", Settings(json_key="content")).documents == 2
    assert texts(tmp_path / "out") == ["one", "two\nlines"]


@pytest.mark.parametrize("border", ["\n\n", "\r\n \r\n", "\n"], ids=["paragraphs", "CRLF", "lines alone"])
def test_one_text_is_cut_so_that_a_split_leaves_documents_for_validation(tmp_path, border, capsys):
    """`data prepare --input book.txt`, then `train`: refused, no document for validation."""
    book = "".join(f"Paragraph {number}, a line\nand another.{border}" for number in range(1000))
    (tmp_path / "book.txt").write_text(book, "utf-8", newline="")
    argv = ["data", "prepare", "--input", str(tmp_path / "book.txt"), "--output", str(tmp_path / "out")]
    assert cli.main(argv) == 0
    assert "100 documents" in capsys.readouterr().out
    pieces = texts(tmp_path / "out")
    assert "".join(pieces) == book
    assert all(len(piece) < 2 * len(book) / 100 and piece.endswith(border) for piece in pieces)
    _check_split(str(tmp_path / "out"), "98,2,0", needs_validation=True)
    (tmp_path / "letter.txt").write_text("Another document.")  # negative control: documents are not cut otherwise
    assert prepare(list(tmp_path.glob("*.txt")), tmp_path / "two").documents == 2
    assert cut("one line") == ["one line"]
    assert cut("one\ntwo\n\n  three\n") == ["one\n", "two\n\n", "  three\n"]


# Doing it again


def test_data_that_is_there_needs_overwrite(tree, tmp_path):
    prepare([tree], tree / "out")
    (tree / "notes.txt").write_text("changed")
    with pytest.raises(UserError, match=r"out\.bin exists already; add --overwrite"):
        prepare([tree], tree / "out")
    before = len(texts(tree / "out"))
    prepare([tree], tree / "out", overwrite=True)  # which is not read as input
    assert "changed" in texts(tree / "out")
    assert len(texts(tree / "out")) == before


def test_data_that_was_trained_on_can_be_prepared_again(tree, tmp_path):
    """A second quickstart was refused: megatron-core's indices had made a folder of the prefix data/stdlib.

    And other documents under an old prefix were read by the old indices, which their key does not tell apart.
    """
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from megatron_muon.megatron.model import gpt

    def samples(prefix, **settings):
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=4, blend=([str(prefix)], None), split="100,0,0", tokenizer=tokenizer,
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, **settings,
        )  # fmt: skip
        builder = gpt.BlendedMegatronDatasetBuilder(gpt.GPTDataset, [5, 0, 0], lambda: True, config)
        return [sample["tokens"].tolist() for sample in builder.build()[0]]

    tokenizer = tokenizers.build(TokenizerSpec().in_training())
    prefix = tmp_path / "data" / "mine"
    prepare([tree / "notes.txt"], prefix)
    samples(prefix)
    endings = (".bin", ".cache", ".idx", ".prepared.json")
    assert sorted(path.name for path in prefix.parent.glob("[!.]*")) == [f"mine{ending}" for ending in endings]
    assert list((prefix.parent / "mine.cache").iterdir())
    (prefix / "cache").mkdir(parents=True)  # of Megatron-LM itself, or of an earlier version
    (tree / "notes.txt").write_text("\n".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    mine = prefix.parent / "mine.cache" / "mine.txt"
    mine.touch()
    prepare([tree / "notes.txt"], prefix, overwrite=True)
    assert mine.exists()  # this tool did not write it
    prepare([tree / "notes.txt"], tmp_path / "fresh")
    assert samples(prefix) == samples(tmp_path / "fresh")
    samples(prefix, path_to_cache=str(tmp_path / "chosen"))
    assert any("GPTDataset-train" in path.name for path in (tmp_path / "chosen").iterdir())


def test_an_interrupted_run_leaves_nothing_and_an_interrupted_overwrite_the_old_data(tree, tmp_path):
    def interrupt(files):
        yield files[0]
        raise KeyboardInterrupt

    prefix = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare([tree], prefix, watch=interrupt)
    assert leftovers(tmp_path, "out") == []
    prepare([tree], prefix)
    before = digest(prefix)
    (tree / "a" / "broken.jsonl").write_text("{")
    with pytest.raises(UserError):
        prepare([tree], prefix, overwrite=True)
    assert digest(prefix) == before
    assert leftovers(tmp_path, "out") == ["out.bin", "out.idx", "out.prepared.json"]


# What a user can get wrong


@pytest.mark.parametrize("line", ["{", "[1]", '{"body": "x", "id": 1}', '{"text": 5}'])
def test_broken_jsonl_names_file_and_line(tmp_path, line):
    (tmp_path / "part.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"part\.jsonl:2: must be a JSON object .* in the field 'text' \(--json-key\)"):
        prepare([tmp_path / "part.jsonl"], tmp_path / "out")
    assert leftovers(tmp_path, "out") == []


def tokenizer(*spec, **settings):
    return {"settings": Settings(tokenizer=TokenizerSpec(*spec, **settings))}


@pytest.mark.parametrize(
    ("inputs", "given", "message"),
    [
        ("", tokenizer(vocab_size=300), "has 257 ids, not --vocab-size 300; leave it out"),
        ("", tokenizer(model="gpt2"), "has no --tokenizer-model; leave it out, or give its --tokenizer-type"),
        ("", tokenizer("TikTokenizer"), "needs --tokenizer-model"),
        ("", tokenizer("TikTokenizer", "/nowhere"), "--tokenizer-type TikTokenizer"),
        ("", {"settings": Settings(suffixes=(".rs",))}, r"found no file \.rs"),
        ("nowhere", {}, "cannot read or write .*nowhere"),
        ("binary.py", {}, r"found no document in 1 files .*1 files that are not UTF-8"),
        ("", {"output": "notes.txt/out"}, "cannot read or write .*notes.txt"),
    ],
)
def test_wrong_inputs_outputs_and_tokenizers_are_refused(tree, tmp_path, inputs, given, message):
    output = tree / given["output"] if "output" in given else tmp_path / "out"
    others = {name: value for name, value in given.items() if name != "output"}
    with pytest.raises(UserError, match=message):
        prepare([tree / inputs], output, **others)


# The standard library, and several processes at once


def test_the_standard_library_is_python_only_and_written_once(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tree))
    write = corpus._write
    for _ in range(2):
        prepare([], tmp_path / "stdlib", Settings(stdlib=STDLIB), overwrite=True)
        monkeypatch.setattr(corpus, "_write", None)  # where the second would end
    monkeypatch.setattr(corpus, "_write", write)
    assert texts(tmp_path / "stdlib") == ["first = 1\r\n", "second = 'ü'\n"]
    whole = (tmp_path / "stdlib.bin").read_bytes()
    (tmp_path / "stdlib.bin").write_bytes(whole[:-1])  # as a full disk leaves it
    prepare([], tmp_path / "stdlib", Settings(stdlib=STDLIB), overwrite=True)
    assert (tmp_path / "stdlib.bin").read_bytes() == whole


def test_the_lock_keeps_other_processes_out(tmp_path):
    """The story: two ranks find no corpus, and both start to write it."""
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = [sys.executable, "-c", take, str(tmp_path / ".corpus.lock")]
    with corpus.OutputPaths(tmp_path / "corpus").locked():
        assert b"BlockingIOError" in subprocess.run(other, stderr=subprocess.PIPE).stderr
    assert subprocess.run(other).returncode == 0


# The command


def test_the_command_reports_what_it_wrote_and_how_to_use_it(tree, tmp_path, capsys):
    argv = ["data", "prepare", "--input", str(tree), "--suffix", ".py", ".txt", "--output", str(tmp_path / "out")]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "3 documents, 34 tokens; skipped: 2 files that are not UTF-8 text, 1 empty files" in out
    assert f"train with: --data-path {tmp_path / 'out'} --tokenizer-type NullTokenizer --vocab-size 257" in out
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("megatron-muon: error: ")


def test_a_folder_is_no_prefix(tmp_path, monkeypatch, capsys):
    """`--output data/` wrote data.bin beside the folder, into the checkout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "there").mkdir()
    for output in ("data/", "there"):
        assert cli.main(["data", "prepare", "--input", "text.txt", "--output", output]) == 2
        assert f"--output {output}" in capsys.readouterr().err.replace("'", "")
    assert not list(tmp_path.glob("*.bin"))


def test_a_tokenizer_without_its_package_says_what_to_install(monkeypatch):
    """megatron-core said: name 'AutoTokenizer' is not defined."""
    monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"HuggingFaceTokenizer needs the package transformers; type pip install tra"):
        tokenizers.build(tokenizers.TokenizerSpec("HuggingFaceTokenizer", "gpt2"))
