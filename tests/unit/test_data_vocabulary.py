"""Data of one tokenizer and a run of another: refused before training, with both named."""

import argparse
from pathlib import Path

import pytest
from msgspec.structs import replace

from megatron_muon.errors import UserError
from megatron_muon.megatron.data import corpus, prepare
from megatron_muon.megatron.data.vocabulary import check_vocabulary
from megatron_muon.megatron.flags.path_checks import check_vocabularies, require_data


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
    return str(prepare([tmp_path / "text.txt"], tmp_path / "text").prefix)


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
    with pytest.raises(UserError, match=r"--data-path .*text\.bin: leave \.bin out; type --data-path .*text$"):
        require_data(run(data=[text + ".bin"]))


def test_without_a_manifest_the_ids_at_the_beginning_count(text, tmp_path):
    (tmp_path / "text.prepared.json").unlink()
    check_vocabulary(text, run("HuggingFaceTokenizer", rows=50304, model="gpt2", size=None))
    with pytest.raises(UserError, match="holds token id 256, and the model has 128 "):
        check_vocabulary(text, run(rows=128, size=100))


def test_a_tokenizer_file_in_another_folder_is_the_same(text, tmp_path, monkeypatch):
    """A relative path and an absolute one, or a folder that was moved."""
    for folder in ("a", "b", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.model").write_text("other" if folder == "other" else "same")
    spec = corpus.TokenizerSpec("SentencePieceTokenizer", str(tmp_path / "a" / "t.model"))
    made = corpus.OutputPaths(Path(text)).read_manifest()
    settings = replace(made.settings, tokenizer=spec, tokenizer_digest=corpus.model_digest(spec))
    manifest = replace(made, settings=settings, vocab_size=32000)
    monkeypatch.setattr(corpus.OutputPaths, "read_manifest", lambda self: manifest)

    def of(folder, rows):
        return run("Llama2Tokenizer", rows=rows, model=str(tmp_path / folder / "t.model"), size=None)

    for folder in ("a", "b"):
        check_vocabulary(text, of(folder, 32000))
    with pytest.raises(UserError, match=r"a/t\.model, .* this run has .*other/t\.model"):
        check_vocabulary(text, of("other", 32000))
    with pytest.raises(UserError, match="vocabulary of 32000"):
        check_vocabulary(text, of("b", 31999))
