"""Checkpoints that are written here are read here, whatever names they have; folders and tokenizers."""

from __future__ import annotations

import argparse
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_muon import cli
from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.megatron.data.tokenizers import TokenizerSpec
from megatron_muon.tools.models import eval_command, folder, tokenizer, written
from megatron_muon.tools.models.architecture import Architecture
from megatron_muon.tools.models.generate_command import Shown
from megatron_muon.tools.models.mapping import Rule, rules
from megatron_muon.tools.models.source import counterpart, open_weights
from megatron_muon.tools.models.weights import STACKED, Weights
from tests.unit.test_models_mapping import MODELS, args_of


def values(model: Architecture) -> Callable[[Rule], Tensor]:
    """Other numbers for every weight, the same at every call; rows that pad are zeros."""
    chance = torch.Generator().manual_seed(3)
    made = {rule.megatron: torch.randn(rule.shape, generator=chance) for rule in rules(model)}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in made:
            made[name][model.vocab :] = 0
    return lambda rule: made[rule.megatron]


def write(
    place: Path,
    model: Architecture,
    args: argparse.Namespace,
    *,
    layout: str = written.FSDP_DTENSOR,
    te: bool = False,
) -> Path:
    """A checkpoint of a model's weights with other arguments."""
    table, read = {rule.megatron: rule for rule in rules(model) if rule.megatron}, values(model)
    shapes = {name: rule.shape for name, rule in table.items()}
    return written.write(
        place, shapes, lambda name: read(table[name]), layout=layout, args=args, iteration=7, dtype=torch.float32,
        transformer_engine=te,
    )  # fmt: skip


def saved(place: Path, model: Architecture, layout: str, *, te: bool = False, grouped: bool = False) -> Path:
    """A checkpoint in `place`."""
    return write(place, model, args_of(model, bf16=False, fp16=False, moe_grouped_gemm=grouped), layout=layout, te=te)


@pytest.mark.parametrize("experts", [0, 2])
def test_weights_that_hugging_face_has_no_place_for_go_to_torch_dist_and_come_back(
    tmp_path: Path, experts: int
) -> None:
    """Layers of two kinds have entries of their own, experts share one; and so for layers that are alike."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (6, 4)}
    for layer in range(2):
        name = f"decoder.layers.{layer}"
        shapes |= {f"{name}.self_attention.linear_kv_down_proj.weight": (3, 4), f"{name}.input_layernorm.weight": (4,)}
        shapes |= {f"{name}.pre_mlp_layernorm.weight": (4,)}
        if layer * experts:
            shapes[f"{name}.mlp.router.weight"] = (experts, 4)
        for expert in range(layer * experts):
            of_expert = f"{name}.mlp.experts.local_experts.{expert}"
            shapes |= {f"{of_expert}.linear_fc1.weight_{half}": (5, 4) for half in "wv"}
            shapes[f"{of_expert}.linear_fc2.weight"] = (4, 5)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    args = args_of(MODELS["llama"], num_layers=2, num_experts=experts or None, moe_layer_freq=[0, 1] if experts else 1)
    for number, (place, read) in enumerate(((tmp_path / "a", values), (tmp_path / "b", None))):
        source = read or Weights(files.find(tmp_path / "a"))
        written.write(
            place, shapes, lambda name, of=source: of[name].clone(), layout=written.TORCH_DIST, args=args,
            iteration=number, dtype=torch.float32, transformer_engine=bool(number),
        )  # fmt: skip
        found = Weights(files.find(place))
        assert found.keys() == shapes.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())
    norms = [name for name in found._tensors if "norm" in name]
    assert ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in norms) == (experts > 0)
    assert ("decoder.layers.1.pre_mlp_layernorm.weight" in norms) == (experts > 0)
    assert ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in norms) == (experts > 0)
    stacked = {name.startswith(STACKED) and not name.removeprefix(STACKED)[0].isdecimal() for name in found._tensors}
    assert (True in stacked) == (experts == 0)


@pytest.mark.parametrize("name", ["llama", "llama tied, with biases", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("layout", [written.FSDP_DTENSOR, written.TORCH_DIST])
@pytest.mark.parametrize("layers", ["local", "transformer_engine", "grouped"])
def test_weights_are_those_that_were_written_under_any_names(
    tmp_path: Path, name: str, layout: str, layers: str
) -> None:
    model = MODELS[name]
    read = values(model)
    found = saved(tmp_path, model, layout, te=layers != "local", grouped=layers == "grouped")
    weights = Weights(found)
    table = {rule.megatron: rule for rule in rules(model)}
    assert weights.keys() == table.keys()
    for weight, rule in table.items():
        assert weights.shape(weight) == rule.shape
        assert torch.equal(weights[weight], read(rule))
    assert weights.iteration == 7
    assert files.problems(found) == []
    assert files.find(tmp_path) == found


def test_layers_of_transformer_engine_have_other_names_in_the_files(tmp_path: Path) -> None:
    """The negative control of the test above: what it reads alike is not alike."""
    names = []
    for te in (False, True):
        index = Weights(saved(tmp_path / str(te), MODELS["llama"], written.FSDP_DTENSOR, te=te))._tensors
        names.append({name for name in index if "norm" in name})
    assert not {name for name in names[0] & names[1] if "layers" in name}


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_an_export_in_several_files_is_loaded_as_a_whole(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    read = values(model)
    total = folder.write_tensors(tmp_path, rules(model), read, dtype=torch.float32, limit=2000)
    index = json.loads((tmp_path / folder.INDEX).read_text())
    assert index["metadata"]["total_size"] == total
    assert len(set(index["weight_map"].values())) > 2
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    largest = max(torch.Size(rule.shape).numel() * 4 for rule in rules(model))
    assert max(sizes) < max(2000, largest) + 4000  # and a header
    tensors = folder.Tensors(tmp_path)
    folder.check(tensors, rules(model), tmp_path, tied=model.tied)
    for rule in rules(model):
        assert torch.equal(rule.join([tensors[part] for part in rule.hf]), read(rule))
    assert stat.S_IMODE(next(tmp_path.glob("*.safetensors")).stat().st_mode) & 0o044  # not for one user alone


def test_a_folder_that_lacks_tensors_or_has_others_is_refused(tmp_path: Path) -> None:
    model = MODELS["llama"]
    table = rules(model)
    folder.write_tensors(tmp_path, table[1:], values(model), dtype=torch.float32, limit=10**9)
    with pytest.raises(UserError, match=r"lacks model.embed_tokens.weight"):
        folder.check(folder.Tensors(tmp_path), table, tmp_path, tied=False)
    folder.write_tensors(tmp_path, table, values(model), dtype=torch.float32, limit=10**9)
    with pytest.raises(UserError, match=r"no place in Megatron for lm_head.weight"):
        folder.check(folder.Tensors(tmp_path), table[:-1], tmp_path, tied=False)
    folder.check(folder.Tensors(tmp_path), table[:-1], tmp_path, tied=True)  # older folders hold it all the same
    with pytest.raises(UserError, match=r"another shape of lm_head.weight, model.embed_tokens.weight"):
        folder.check(folder.Tensors(tmp_path), rules(replace(model, vocab=9)), tmp_path, tied=False)
    next(tmp_path.glob("*.safetensors")).write_bytes(b"not a file of tensors")
    with pytest.raises(UserError, match="cannot be read"):
        folder.Tensors(tmp_path)


def test_names_of_gpt2_may_lack_the_prefix(tmp_path: Path) -> None:
    """As those of the published gpt2 do, which hold masks beside weights."""
    model = MODELS["gpt2"]
    bare = [replace(rule, hf=tuple(name.removeprefix("transformer.") for name in rule.hf)) for rule in rules(model)]
    mask = Rule("mask", ("h.0.attn.bias",), (1, 1, 4, 4), lambda weight: [weight], lambda parts: parts[0])
    read = values(model)
    folder.write_tensors(
        tmp_path, [*bare, mask], lambda rule: torch.ones(rule.shape) if rule is mask else read(rule),
        dtype=torch.float32, limit=10**9,
    )  # fmt: skip
    tensors = folder.Tensors(tmp_path, prefix="transformer.")
    folder.check(tensors, rules(model), tmp_path, tied=True)


def damage(found: Path) -> None:
    data = bytearray((found / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (found / "__0_0.distcp").write_bytes(data)


@pytest.mark.parametrize("command", ["export --to hf OUT", "generate --prompt a", "eval --data DATA"])
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (damage, "is damaged: its CRC-32 is"),
        (lambda found: (found / "__0_0.distcp").unlink(), "cannot be read"),
        (lambda found: (found / ".metadata").write_bytes(b"\x80garbage"), ".metadata"),
        (lambda found: found.rename(found.with_name("iter_0000008")), "does not exist"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, harm: Callable[[Path], object], says: str
) -> None:
    harm(saved(tmp_path / "run", MODELS["llama"], written.FSDP_DTENSOR))
    data = make_data(tmp_path)
    words = [{"OUT": str(tmp_path / "out"), "DATA": data}.get(word, word) for word in command.split()]
    assert cli.main([words[0], "--checkpoint", str(tmp_path / "run"), *words[1:]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert says in lines[0]
    assert not (tmp_path / "out").exists()


def make_data(place: Path) -> str:
    """Prepared data of one short document."""
    from megatron_muon.megatron.data import prepare

    source = place / "text.txt"
    source.write_text("some text", "utf-8")
    prepare([source], place / "text")
    return str(place / "text")


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        open_weights(tmp_path / "nowhere", verify=True)
    with pytest.raises(UserError, match=r"has no latest_checkpointed_iteration\.txt"):
        open_weights(tmp_path, verify=True)
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match="is a folder of Hugging Face already"):
        open_weights(tmp_path, verify=True)


def test_weights_that_the_arguments_do_not_tell_of_are_refused(tmp_path: Path) -> None:
    model = MODELS["llama"]
    args = args_of(replace(model, layers=1), bf16=False)
    found = write(tmp_path, model, args)
    with pytest.raises(UserError, match=r"has weights without a counterpart: decoder.layers.1.input_layernorm.weight"):
        counterpart(open_weights(found, verify=True))


def test_rows_that_pad_an_unknown_vocabulary_are_kept_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS["llama"]
    args = args_of(model, vocab_size=None, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "no"))
    found = write(tmp_path / "run", model, args)
    assert counterpart(open_weights(found, verify=True)).model.vocab == model.rows
    assert "the rows that pad it to 16 are kept" in capsys.readouterr().err
    assert cli.main(["export", "--checkpoint", str(found), "--to", "torch_dist", "--tokenizer", "x", "out"]) == 2
    assert "--tokenizer is for --to hf" in capsys.readouterr().err


def test_an_export_replaces_a_former_one_alone_and_only_when_asked(tmp_path: Path) -> None:
    """It once deleted the run that it had read."""
    out, source = tmp_path / "out", tmp_path / "run" / "iter_0000001"
    source.mkdir(parents=True)
    (out / "deep").mkdir(parents=True)
    for place, overwrite, says in (
        (out, False, "is there already"),
        (out, True, "is not a model that export or import has written"),
        (tmp_path / "run", True, "lie one in the other"),
        (source / "hf", False, "lie one in the other"),
    ):
        with pytest.raises(UserError, match=says), folder.new_folder(place, source=source, overwrite=overwrite):
            pass
    (out / "config.json").touch()
    with pytest.raises(RuntimeError), folder.new_folder(out, source=source, overwrite=True):
        raise RuntimeError  # in the middle: the old one is there still
    assert (out / "deep").exists()
    with folder.new_folder(out, source=source, overwrite=True) as new:
        (new / "new").touch()
    assert [file.name for file in out.iterdir()] == ["new"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "run"]


@given(st.text(), st.sampled_from(["", "<eod>", "<unused256>", " "]))
def test_the_tokenizer_of_bytes_has_megatrons_ids(text: str, more: str) -> None:
    from megatron_muon.megatron.data import tokenizers

    built = tokenizer.build(TokenizerSpec())
    whole = (text + more).encode("utf-8", "replace").decode()
    theirs = tokenizers.build(TokenizerSpec()).tokenize(whole)
    assert built(whole)["input_ids"] == list(theirs) == list(whole.encode())
    assert built.decode(built(whole)["input_ids"]) == whole
    assert built.eos_token_id == 256
    assert tokenizer.is_of_bytes(built)


def test_the_tokenizer_is_the_one_of_the_data_or_the_runs(tmp_path: Path) -> None:
    def of(**settings: object) -> TokenizerSpec:
        absent = {"tokenizer_model": None, "vocab_size": None, "data_path": None}
        return tokenizer.spec_of(argparse.Namespace(**{**absent, **settings}))

    data = make_data(tmp_path)
    assert of(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="m").model == "m"
    assert (
        of(tokenizer_type="NullTokenizer", vocab_size=300, data_path=["0.3", data]).tokenizer_type
        == "ByteLevelTokenizer"
    )
    assert of(tokenizer_type="NullTokenizer", vocab_size=257).tokenizer_type == "ByteLevelTokenizer"
    unknown = of(tokenizer_type="NullTokenizer", vocab_size=300)
    with pytest.raises(UserError, match="NullTokenizer has no counterpart in transformers; give one"):
        tokenizer.build(unknown)


def test_what_a_model_writes_does_not_reach_the_terminals_controls(capsys: pytest.CaptureFixture[str]) -> None:
    Shown(None)("a\x1b[2Jb\n\tc\x07\r\N{RIGHT-TO-LEFT OVERRIDE}\u3000\u200d")
    assert capsys.readouterr().out == "a\ufffd[2Jb\n\tc\ufffd\ufffd\ufffd\u3000\u200d"


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 8, 9, 16, 17, 23])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_token_is_predicted_once_whatever_is_left_for_the_last_batch(size: int, batch: int) -> None:
    """By a model that sees the last token alone, so that samples of four tokens change nothing."""
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    loaded = SimpleNamespace(
        model=lambda ids: SimpleNamespace(logits=table[ids]), device=torch.device("cpu"),
        tokenizer=SimpleNamespace(eos_token_id=7),
    )  # fmt: skip
    ids = np.random.default_rng(size).integers(0, 8, size).astype(np.uint16)
    before = [7, *ids[:-1].tolist()]
    wanted = -sum(float(table[a].log_softmax(0)[b]) for a, b in zip(before, ids.tolist(), strict=True))
    assert sum(eval_command._losses(loaded, ids, length=4, batch=batch)) == pytest.approx(wanted, rel=1e-5)


def test_lines_are_broken_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    show = Shown(4)
    for part in ("ab", "cdef", "\n", "ghij", "k"):
        show(part)
    show("lmn", end="\n")
    assert capsys.readouterr().out == "abcd\nef\nghij\nklmn\n"


@pytest.mark.parametrize(
    "command",
    ["import --from hf HF OUT", "generate --checkpoint HF --prompt a", "plan --hf HF --world-size 2"],
)
def test_code_that_lies_in_a_models_folder_is_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """transformers asks whether to run it, and `yes | megatron-muon import` did."""
    hostile = tmp_path / "hf"
    hostile.mkdir()
    (hostile / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"model_type": "hostile", "auto_map": {"AutoConfig": "hostile.Config"}}
    (hostile / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda prompt="": "yes")
    places = {"HF": str(hostile), "OUT": str(tmp_path / "out")}
    assert cli.main([places.get(word, word) for word in command.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "contains custom code" in line
    assert not (tmp_path / "ran").exists()
