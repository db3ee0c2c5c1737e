"""Data of one tokenizer and a run of another: refused before training, with both named."""

import argparse
from pathlib import Path

import pytest
from msgspec.structs import replace

from megatron_muon.errors import UserError
from megatron_muon.megatron.data import TokenizerSpec, corpus, prepare
from megatron_muon.megatron.data.vocabulary import check_vocabulary
from megatron_muon.megatron.flags.arguments import check_vocabularies, require_data


def run(kind: str = "NullTokenizer", rows: int = 384, model: str | None = None, size: int | None = 257, data=None):
    return argparse.Namespace(
        tokenizer_type=kind, tokenizer_model=model, vocab_size=size, padded_vocab_size=rows, mock_data=False,
        skip_train=False, data_path=data, train_data_path=None, valid_data_path=None, test_data_path=None,
        data_args_path=None, per_split_data_args_path=None, split=None,
    )  # fmt: skip


@pytest.fixture
def text(tmp_path):
    """Bytes with 257 ids, as `data prepare` writes them."""
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    prepare([tmp_path / "text.txt"], tmp_path / "text")
    return str(tmp_path / "text")


def test_data_of_another_tokenizer_or_a_larger_vocabulary_is_refused_with_both_named(text):
    """It ended in `IndexError: index out of range in self` on every rank, or trained on nonsense."""
    check_vocabulary(text, run())
    check_vocabulary(text, run(size=300))
    with pytest.raises(UserError, match=r"text was made with ByteLevelTokenizer, .* this run has HuggingFaceT.* gpt2 "):
        check_vocabulary(text, run("HuggingFaceTokenizer", rows=50304, model="gpt2", size=None))
    with pytest.raises(UserError, match=r"of 257; .* --vocab-size 200 .* 256 \(padded\); .*--vocab-size 257"):
        check_vocabulary(text, run(rows=256, size=200))
    with pytest.raises(UserError, match="text was made with"):
        check_vocabularies(run(rows=128, size=100, data=["0.5", "absent", "0.5", text]))
    with pytest.raises(UserError, match=r"text\.bin\.bin does not exist; give the prefix of a \.bin and an \.idx file"):
        require_data(run(data=[text + ".bin"]))


def test_without_a_manifest_the_ids_at_the_beginning_count(text, tmp_path):
    (tmp_path / "text.prepared.json").unlink()
    check_vocabulary(text, run("HuggingFaceTokenizer", rows=50304, model="gpt2", size=None))
    with pytest.raises(UserError, match=r"not known, a vocabulary of 257; .* a model of 128 "):
        check_vocabulary(text, run(rows=128, size=100))


def test_a_tokenizer_in_another_folder_is_the_same(text, monkeypatch):
    """A relative path and an absolute one, or a folder that was moved."""
    made = corpus.OutputPaths(Path(text)).read_manifest()
    spec = corpus.Settings(tokenizer=TokenizerSpec("SentencePieceTokenizer", "a/t.model"))
    manifest = replace(made, settings=spec, vocab_size=32000)
    monkeypatch.setattr(corpus.OutputPaths, "read_manifest", lambda self: manifest)
    check_vocabulary(text, run("SentencePieceTokenizer", rows=32000, model="/b/t.model", size=None))
    for model, rows in (("a/other.model", 32000), ("a/t.model", 31999)):
        with pytest.raises(UserError, match=r"a/t\.model, a vocabulary of 32000; this run has"):
            check_vocabulary(text, run("SentencePieceTokenizer", rows=rows, model=model, size=None))
