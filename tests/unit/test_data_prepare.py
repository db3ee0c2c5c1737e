"""`megatron-muon data prepare`: the ids, the files, and everything that can be wrong with the input."""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_muon import cli
from megatron_muon.errors import UserError
from megatron_muon.megatron.data import Settings, TokenizerSpec, corpus, ensure_stdlib_corpus, prepare, tokenizers
from megatron_muon.megatron.data.sources import cut, find_sources
from megatron_muon.megatron.flags import path_checks


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
    (ids,) = tokenizers.encode_documents([("one.txt", "aü")], spec, workers=1)
    assert in_data.tokenize("aü") == ids.tolist() == list("aü".encode())


# What is written


def test_prepares_a_tree_in_sorted_order(tree, tmp_path):
    prepared = prepare([tree], tmp_path / "out" / "corpus", Settings(suffixes=(".py",)))
    assert texts(prepared.prefix) == ["first = 1\r\n", "second = 'ü'\n"]
    assert all(ids[-1] == 256 for ids in documents(prepared.prefix))
    assert documents(prepared.prefix)[0].dtype == np.uint16
    found = prepared.manifest
    assert (found.documents, found.tokens) == (2, 11 + 14 + 2)
    assert found.sizes["bin"] == 2 * found.tokens == Path(f"{prepared.prefix}.bin").stat().st_size
    assert found.skipped == "skipped: 1 binary files, 1 files that are not UTF-8, 1 empty documents"
    prepare([tree / "notes.txt"], tmp_path / "bare", Settings(append_eod=False))
    assert documents(tmp_path / "bare")[0].tolist() == list(b"a note")
    inputs = [tree / "notes.txt", tree, tree / "a" / "one.py"]  # each once, named ones whatever their suffix
    sources = find_sources(inputs, Settings(suffixes=(".py",), exclude=("b", "empty.py")))
    assert [source.label for source in sources] == ["notes.txt", "a/one.py", "binary.py", "latin.py"]


def test_the_same_input_gives_the_same_bytes(tree, tmp_path, monkeypatch):
    """Whatever the order in which the file system lists a directory, and however many processes tokenize."""
    first = prepare([tree], tmp_path / "first")
    walk = Path.walk

    def backwards(*args, **kwargs):
        for directory, subdirectories, names in walk(*args, **kwargs):
            subdirectories.reverse()
            yield directory, subdirectories, names[::-1]

    monkeypatch.setattr(Path, "walk", backwards)
    second = prepare([tree], tmp_path / "second", workers=2)
    assert digest(first.prefix) == digest(second.prefix)
    (tree / "notes.txt").write_text("another note")
    assert digest(prepare([tree], tmp_path / "third").prefix) != digest(first.prefix)


def test_jsonl_documents_are_lines(tmp_path):
    lines = [{"content": "one", "id": 1}, {"content": ""}, {"content": "two\nlines"}]
    file = tmp_path / "part.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    prepared = prepare([file], tmp_path / "out", Settings(json_key="content"))
    assert texts(prepared.prefix) == ["one", "two\nlines"]
    assert "1 empty documents" in prepared.manifest.skipped


def test_text_that_holds_ids_goes_through_megatrons_null_tokenizer(tmp_path):
    (tmp_path / "ids.txt").write_text("5 70000 2")
    spec = TokenizerSpec("NullTokenizer", vocab_size=100_000)
    prepared = prepare([tmp_path / "ids.txt"], tmp_path / "out", Settings(tokenizer=spec))
    assert documents(prepared.prefix)[0].tolist() == [5, 70000, 2, 99_999]
    assert documents(prepared.prefix)[0].dtype == np.int32
    assert prepared.flags[2:] == ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100000")
    small = Settings(tokenizer=TokenizerSpec("NullTokenizer", None, 65_000))
    with pytest.raises(UserError, match=r"ids\.txt: token ids reach from 2 to 70000, the vocabulary has 65000"):
        prepare([tmp_path / "ids.txt"], tmp_path / "small", small)
    (tmp_path / "ids.txt").write_text("five")
    with pytest.raises(UserError, match=r"ids\.txt: the tokenizer does not take this text"):
        prepare([tmp_path / "ids.txt"], tmp_path / "words", Settings(tokenizer=spec))


@pytest.mark.parametrize("border", ["\n\n", "\r\n \r\n", "\n"], ids=["paragraphs", "CRLF", "lines alone"])
def test_one_text_is_cut_so_that_a_split_leaves_documents_for_validation(tmp_path, border, capsys):
    """`data prepare --input book.txt`, then `train`: refused, no document for validation."""
    book = "".join(f"Paragraph {number}, a line\nand another.{border}" for number in range(1000))
    (tmp_path / "book.txt").write_text(book, "utf-8", newline="")
    argv = ["data", "prepare", "--input", str(tmp_path / "book.txt"), "--output", str(tmp_path / "out")]
    assert cli.main(argv) == 0
    assert "one text alone: cut at paragraphs into 100 documents" in capsys.readouterr().out
    pieces = texts(tmp_path / "out")
    assert "".join(pieces) == book
    assert all(len(piece) < 2 * len(book) / 100 and piece.endswith(border) for piece in pieces)
    path_checks._check_split(str(tmp_path / "out"), "98,2,0", needs_validation=True)
    assert cli.main(argv) == 0
    assert "up to date" in capsys.readouterr().out
    (tmp_path / "letter.txt").write_text("Another document.")  # negative control: documents are not cut otherwise
    assert len(texts(prepare(list(tmp_path.glob("*.txt")), tmp_path / "two").prefix)) == 2
    assert cut("one line") == ["one line"]
    assert cut("one\ntwo\n\n  three\n") == ["one\n", "two\n\n", "  three\n"]


# Doing it again


def test_other_input_or_options_or_files_need_overwrite(tree, tmp_path):
    first = prepare([tree], tree / "out")  # which is not read as input
    before = os.stat(f"{first.prefix}.bin").st_mtime_ns
    again = prepare([tree], tree / "out")
    assert again.up_to_date
    assert again.manifest == first.manifest
    assert os.stat(f"{first.prefix}.bin").st_mtime_ns == before
    with pytest.raises(UserError, match="--overwrite"):
        prepare([tree], first.prefix, Settings(append_eod=False))
    (tree / "notes.txt").write_text("changed")
    with pytest.raises(UserError, match=r"out\.bin and .*out\.idx exist already"):
        prepare([tree], first.prefix)
    assert not prepare([tree], first.prefix, overwrite=True).up_to_date
    assert "changed" in texts(first.prefix)
    with open(f"{first.prefix}.bin", "ab") as file:
        file.write(b"xx")
    with pytest.raises(UserError, match="--overwrite"):
        prepare([tree], first.prefix)


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

    tokenizer = tokenizers.build(TokenizerSpec())
    prefix = tmp_path / "data" / "mine"
    prepare([tree / "notes.txt"], prefix)
    samples(prefix)
    endings = (".bin", ".cache", ".idx", ".prepared.json")
    assert sorted(path.name for path in prefix.parent.glob("[!.]*")) == [f"mine{ending}" for ending in endings]
    assert list((prefix.parent / "mine.cache").iterdir())
    (prefix / "cache").mkdir(parents=True)  # of Megatron-LM itself, or of an earlier version
    assert prepare([tree / "notes.txt"], prefix).up_to_date
    (tree / "notes.txt").write_text("\n".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    mine = prefix.parent / "mine.cache" / "mine.txt"
    mine.touch()
    prepare([tree / "notes.txt"], prefix, overwrite=True)
    assert mine.exists()  # this tool did not write it
    fresh = prepare([tree / "notes.txt"], tmp_path / "fresh").prefix
    assert samples(prefix) == samples(fresh)
    samples(prefix, path_to_cache=str(tmp_path / "chosen"))
    assert any("GPTDataset-train" in path.name for path in (tmp_path / "chosen").iterdir())


def test_an_interrupted_run_leaves_nothing_and_an_interrupted_overwrite_the_old_data(tree, tmp_path):
    def interrupt(read, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([tree], tmp_path / "out", progress=interrupt)
    assert leftovers(tmp_path, "out") == []
    prefix = prepare([tree], tmp_path / "out").prefix
    before = digest(prefix)
    (tree / "a" / "broken.jsonl").write_text("{")
    with pytest.raises(UserError):
        prepare([tree], prefix, overwrite=True)
    assert digest(prefix) == before
    assert leftovers(tmp_path, "out") == ["out.bin", "out.idx", "out.prepared.json"]


# What a user can get wrong


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"part\.jsonl:2: not a JSON object"),
        ("[1]", r"part\.jsonl:2: no text in a field 'text' \(fields: none\)"),
        ('{"body": "x", "id": 1}', r"part\.jsonl:2: no text .* \(fields: body \(str\), id \(int\)\); .* --json-key"),
        ('{"text": 5}', r"part\.jsonl:2: no text in a field 'text' \(fields: text \(int\)\)"),
    ],
)
def test_broken_jsonl_names_file_and_line(tmp_path, line, message):
    (tmp_path / "part.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        prepare([tmp_path / "part.jsonl"], tmp_path / "out")
    assert leftovers(tmp_path, "out") == []


def tokenizer(*spec, **settings):
    return {"settings": Settings(tokenizer=TokenizerSpec(*spec, **settings))}


@pytest.mark.parametrize(
    ("inputs", "given", "message"),
    [
        ("", tokenizer("GPT9Tokenizer"), "is not known; choose one of ByteLevelTokenizer"),
        ("", tokenizer(vocab_size=256), "--vocab-size 256 is too small .* at least 257"),
        ("", tokenizer(model="gpt2"), "has no model"),
        ("", tokenizer("NullTokenizer"), "needs --vocab-size"),
        ("", tokenizer("TikTokenizer"), "needs --tokenizer-model"),
        ("", tokenizer("TikTokenizer", "/nowhere"), "--tokenizer-type TikTokenizer"),
        ("", {"workers": 0}, "--workers 0"),
        ("", {"settings": Settings(suffixes=(".rs",))}, r"found no file with suffix \.rs"),
        ("nowhere", {}, r"nowhere.* does not exist"),
        ("binary.py", {}, r"found no document in 1 files .*1 binary"),
        (None, {}, "nothing to prepare; give --input"),
        ("", {"output": "notes.txt/out"}, "cannot read or write .*notes.txt"),
        ("", {"output": ""}, "is a directory; give a prefix in it"),
    ],
)
def test_wrong_inputs_outputs_and_tokenizers_are_refused(tree, tmp_path, inputs, given, message):
    output = tree / given["output"] if "output" in given else tmp_path / "out"
    others = {name: value for name, value in given.items() if name != "output"}
    with pytest.raises(UserError, match=message):
        prepare([] if inputs is None else [tree / inputs], output, **others)


# The standard library, and several processes at once


def test_ensure_stdlib_corpus_takes_python_only_and_writes_once(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "stdlib_directory", lambda: tree)
    writes = []
    write = corpus._write
    monkeypatch.setattr(corpus, "_write", lambda *args: writes.append(1) or write(*args))
    ensure_stdlib_corpus(tmp_path / "data" / "stdlib")
    ensure_stdlib_corpus(tmp_path / "data" / "stdlib")
    assert writes == [1]
    assert prepare([], tmp_path / "data" / "stdlib", Settings(stdlib=corpus.STDLIB)).up_to_date
    assert texts(tmp_path / "data" / "stdlib") == ["first = 1\r\n", "second = 'ü'\n"]


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
    assert "3 documents, 34 tokens, 68 bytes" in out
    assert f"train with: --data-path {tmp_path / 'out'} --tokenizer-type NullTokenizer --vocab-size 257" in out
    assert "skipped: 1 binary files" in out
    assert cli.main([*argv, "--no-append-eod"]) == 2
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
