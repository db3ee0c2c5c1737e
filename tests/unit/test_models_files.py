"""Folders of transformers become checkpoints and come back; folders, tokenizers and text that are
refused.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_muon import cli
from megatron_muon.checkpoint import content, folders
from megatron_muon.errors import UserError
from megatron_muon.tools.models import convert
from megatron_muon.tools.models.architecture import to_config
from megatron_muon.tools.models.hf_model import counterpart, is_byte_level, tokenizer_of
from megatron_muon.tools.models.run_model import _CONTROLS, losses
from megatron_muon.tools.models.weights import Weights, write
from tests.unit.test_models_mapping import MODELS, args_of, transformers


def hf_folder(place: Path, name: str) -> Path:
    """A model with random weights and biases, as transformers saves it."""
    config = transformers.AutoConfig.for_model(**to_config(args_of(name)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    chance = torch.Generator().manual_seed(3)
    for p in model.parameters():
        torch.nn.init.normal_(p, generator=chance)
    model.save_pretrained(place)
    return place


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def import_(folder: Path, out: Path, *, status: int = 0) -> Path:
    assert cli.main(["import", "--from", "hf", str(folder), str(out)]) == status
    return out


def export(checkpoint: Path, out: Path, *, status: int = 0) -> Path:
    words = ["export", "--checkpoint", str(checkpoint), "--to", "hf", str(out)]
    assert cli.main(words) == status
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; not to be changed."""
    place = tmp_path_factory.mktemp("llama")
    return import_(hf_folder(place / "hf", "llama"), place / "in")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("has_te", [False, True], ids=["local", "transformer_engine"])
def test_every_tensor_of_transformers_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_te: bool
) -> None:
    """Through a checkpoint with the names of either layers, and an export in several files."""
    monkeypatch.setattr(convert, "has_transformer_engine", lambda: has_te)
    monkeypatch.setattr(convert, "_FILE_BYTES", 2000)
    source = tensors_in(hf_folder(tmp_path / "hf", name))
    checkpoint = import_(tmp_path / "hf", tmp_path / "in")
    assert folders.problems(checkpoint / "release", threads=1) == []
    out = export(checkpoint, tmp_path / "out")
    back = tensors_in(out)
    assert back.keys() == source.keys()
    assert all(torch.equal(back[tensor], source[tensor]) for tensor in source)
    files = list(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(files) > 2
    # not for one user alone
    assert stat.S_IMODE(files[0].stat().st_mode) & 0o044
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_transformer_engines_layers_have_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "has_transformer_engine", lambda: True)
    import_(hf_folder(tmp_path / "hf", "qwen3_moe"), tmp_path / "in")
    entries = content.read_entries(tmp_path / "in" / "release")
    layer = "model.module.decoder.layers.0."
    assert f"{layer}self_attention.linear_qkv.layer_norm_weight" in entries
    assert f"{layer}mlp.experts.linear_fc2.weight1" in entries
    assert f"{layer}pre_mlp_layernorm.weight" in entries  # of the router


def test_a_checkpoint_of_an_older_megatron_has_fewer_arguments(llama: Path, tmp_path: Path) -> None:
    weights = Weights(llama)
    for name in ("moe_layer_freq", "moe_router_topk", "use_rope_scaling", "qk_layernorm"):
        delattr(weights.args, name)
    write(tmp_path / "old", weights.tensors, weights.args)
    before = tensors_in(export(llama, tmp_path / "before"))
    after = tensors_in(export(tmp_path / "old", tmp_path / "after"))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks model.norm.weight"),
        (
            lambda tensors: tensors.update(more=torch.ones(2)),
            "has, without a counterpart, more",
        ),
    ],
)
def test_a_folder_that_lacks_tensors_or_has_others_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Tensor]], object],
    says: str,
) -> None:
    tensors = tensors_in(hf_folder(tmp_path / "hf", "llama"))
    change(tensors)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    import_(tmp_path / "hf", tmp_path / "out", status=2)
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_safetensors_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as git-lfs leaves in the place of one."""
    file = hf_folder(tmp_path / "hf", "llama") / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    import_(tmp_path / "hf", tmp_path / "out", status=2)
    assert "model.safetensors cannot be read" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_in_one_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(llama / "release", tmp_path / "release")
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.write(b"damage")
    export(folder, tmp_path / "out", status=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "is damaged: its CRC-32 is" in line
    assert not (tmp_path / "out").exists()


def test_weights_that_the_arguments_do_not_describe_are_refused(llama: Path) -> None:
    weights = Weights(llama)
    weights.args.num_layers = 1
    with pytest.raises(
        UserError, match=r"without a counterpart, decoder.layers.1.input_layernorm.weight"
    ):
        counterpart(weights, None, torch.float32)


def test_without_a_tokenizer_there_is_a_warning_and_rows_that_pad_an_unknown_vocabulary_are_kept(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = Weights(llama)
    vars(weights.args).update(tokenizer_type="TikTokenizer", vocab_size=None)
    write(tmp_path / "run", weights.tensors, weights.args)
    found = counterpart(Weights(tmp_path / "run"), None, torch.float32)
    assert found.config["vocab_size"] == weights.args.padded_vocab_size
    assert "no --tokenizer-type TikTokenizer" in capsys.readouterr().err
    assert cli.main(["generate", "--checkpoint", str(tmp_path / "run"), "--prompt", "a"]) == 2
    assert "text needs a tokenizer" in capsys.readouterr().err


def test_an_export_replaces_nothing(llama: Path, tmp_path: Path) -> None:
    """It once deleted the run that it had read."""
    (tmp_path / "mine").touch()
    export(llama, tmp_path, status=2)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


@given(st.text(), st.sampled_from(["", "<eod>", "<unused256>", " "]))
def test_the_tokenizer_of_bytes_has_megatrons_ids(text: str, more: str) -> None:
    from megatron.core.tokenizers.text.libraries.bytelevel_tokenizer import ByteLevelTokenizer

    built = tokenizer_of(args_of("llama", tokenizer_type="NullTokenizer", vocab_size=257))
    whole = (text + more).encode("utf-8", "replace").decode()
    theirs = ByteLevelTokenizer(vocab_size=256).text_to_ids(whole)
    assert built(whole)["input_ids"] == list(theirs) == list(whole.encode())
    assert built.decode(built(whole)["input_ids"]) == whole
    assert built.eos_token_id == 256
    assert is_byte_level(built)


def test_controls_of_a_terminal_are_replaced() -> None:
    assert _CONTROLS.sub("?", "a\x1b[2Jb\n\tc\x07\r\N{RIGHT-TO-LEFT OVERRIDE}") == "a?[2Jb\n\tc???"


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 23])
def test_every_token_is_predicted_once(size: int) -> None:
    """By a model that sees the last token alone, so that samples of four tokens change nothing."""
    chance = torch.Generator().manual_seed(size)
    table = torch.randn(8, 8, generator=chance)

    class Model:
        device = torch.device("cpu")

        def __call__(self, ids: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=table[ids])

    ids = torch.randint(0, 8, (size + 1,), generator=chance)
    predicted = table.log_softmax(1)[ids[:-1], ids[1:]]
    found = sum(losses(Model(), ids, length=4))
    assert found == pytest.approx(-float(predicted.sum()), rel=1e-5)


@pytest.mark.parametrize("command", ["import --from hf hf out", "plan --hf hf --world-size 2"])
def test_code_that_lies_in_a_models_folder_is_never_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    """transformers asks whether to run it, and `yes | megatron-muon import` did."""
    hostile = tmp_path / "hf"
    hostile.mkdir()
    (hostile / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"model_type": "hostile", "auto_map": {"AutoConfig": "hostile.Config"}}
    (hostile / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda prompt="": "yes")
    monkeypatch.chdir(tmp_path)
    assert cli.main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "contains custom code" in line
    assert not (tmp_path / "ran").exists()
