"""Checkpoints that are written here are read here, whatever names they have; folders and
tokenizers.
"""

from __future__ import annotations

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
from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError
from megatron_muon.tools.models import convert, mapping
from megatron_muon.tools.models.hf_model import counterpart, is_byte_level, tokenizer_of
from megatron_muon.tools.models.mapping import WeightRow, hf_shapes
from megatron_muon.tools.models.run_model import SafeStreamer, losses
from megatron_muon.tools.models.weights import FSDP_DTENSOR, STACKED, TORCH_DIST, Weights, write
from tests.unit.test_models_mapping import ROWS, args_of, rules


def values(name: str) -> Callable[[WeightRow], Tensor]:
    """Other numbers for every weight, the same at every call; rows that pad are zeros."""
    chance = torch.Generator().manual_seed(3)
    made = {rule.megatron: torch.randn(rule.shape, generator=chance) for rule in rules(name)}
    for end in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if end in made:
            made[end][11:] = 0
    return lambda rule: made[rule.megatron]


def saved(
    place: Path, name: str, layout: str = FSDP_DTENSOR, *, impl: str = "local", **args: object
) -> Path:
    """A checkpoint of a model with these arguments; the folder of its iteration."""
    table, read = {rule.megatron: rule for rule in rules(name)}, values(name)
    write(
        place,
        {name: rule.shape for name, rule in table.items()},
        lambda name: read(table[name]),
        layout=layout,
        args=args_of(name, transformer_impl=impl, **args),
        iteration=7,
        dtype=torch.float32,
    )
    return place / "iter_0000007"


@pytest.mark.parametrize("experts", [0, 2])
def test_weights_that_hugging_face_has_no_place_for_go_to_torch_dist_and_come_back(
    tmp_path: Path, experts: int
) -> None:
    """Layers of two kinds have entries of their own, experts share one; and so for layers that are
    alike.
    """
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (6, 4)}
    for layer in range(2):
        name = f"decoder.layers.{layer}"
        shapes |= {
            f"{name}.self_attention.linear_kv_down_proj.weight": (3, 4),
            f"{name}.input_layernorm.weight": (4,),
        }
        shapes |= {f"{name}.pre_mlp_layernorm.weight": (4,)}
        if layer * experts:
            shapes[f"{name}.mlp.router.weight"] = (experts, 4)
        for expert in range(layer * experts):
            of_expert = f"{name}.mlp.experts.local_experts.{expert}"
            shapes |= {f"{of_expert}.linear_fc1.weight_{half}": (5, 4) for half in "wv"}
            shapes[f"{of_expert}.linear_fc2.weight"] = (4, 5)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    read: Callable[[str], Tensor] = values.__getitem__
    layers = {
        "num_layers": 2,
        "num_experts": experts or None,
        "moe_layer_freq": [0, 1] if experts else 1,
    }
    # the second reads what the first has written
    for number, impl in enumerate(("local", "transformer_engine")):
        write(
            tmp_path / impl,
            shapes,
            lambda name, read=read: read(name).clone(),
            layout=TORCH_DIST,
            args=args_of("llama", transformer_impl=impl, **layers),
            iteration=number,
            dtype=torch.float32,
        )
        found = Weights(tmp_path / impl)
        read = found.read
        assert found.shapes == shapes
        assert all(torch.equal(found.read(name), value) for name, value in values.items())
    norms = [name for name in found._entries if "norm" in name]
    assert ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in norms) == (
        experts > 0
    )
    assert ("decoder.layers.1.pre_mlp_layernorm.weight" in norms) == (experts > 0)
    assert ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in norms) == (experts > 0)
    stacked = {
        name.startswith(STACKED) and not name.removeprefix(STACKED)[0].isdecimal()
        for name in found._entries
    }
    assert (True in stacked) == (experts == 0)


@pytest.mark.parametrize("name", ["llama", "llama tied, with biases", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("layout", [FSDP_DTENSOR, TORCH_DIST])
@pytest.mark.parametrize("layers", ["local", "transformer_engine", "grouped"])
def test_weights_are_those_that_were_written_under_any_names(
    tmp_path: Path, name: str, layout: str, layers: str
) -> None:
    read = values(name)
    impl = layers.replace("grouped", "transformer_engine")
    found = saved(tmp_path, name, layout, impl=impl, moe_grouped_gemm=layers == "grouped")
    weights = Weights(tmp_path)
    assert weights.shapes == {rule.megatron: rule.shape for rule in rules(name)}
    assert all(torch.equal(weights.read(rule.megatron), read(rule)) for rule in rules(name))
    assert (weights.folder, weights.iteration) == (found, 7)
    assert folders.problems(found) == []
    if (name, layout) == ("llama", FSDP_DTENSOR):  # negative control: the names are not alike
        assert any(".layers.0.input_layernorm" in entry for entry in weights._entries) == (
            layers == "local"
        )


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_an_export_in_several_files_is_loaded_as_a_whole(tmp_path: Path, name: str) -> None:
    read = values(name)
    total = convert.write_tensors(tmp_path, rules(name), read, dtype=torch.float32, limit=2000)
    index = json.loads((tmp_path / convert.INDEX).read_text())
    assert index["metadata"]["total_size"] == total
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(set(index["weight_map"].values())) == len(sizes) > 2
    assert max(sizes) < 2000 + 4000  # and a header
    tensors = convert.open_tensors(tmp_path)
    mapping.check_shapes(
        tmp_path,
        {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()},
        hf_shapes(rules(name)),
    )
    for rule in rules(name):
        assert torch.equal(
            rule.to_megatron([tensors[part][:] for part in rule.hf]),
            read(rule),
        )
    # not for one user alone
    assert stat.S_IMODE(next(tmp_path.glob("*.safetensors")).stat().st_mode) & 0o044


def test_a_folder_that_lacks_tensors_or_has_others_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, hf, whole, read = (
        str(saved(tmp_path / "run", "llama")),
        tmp_path / "hf",
        rules("llama"),
        values("llama"),
    )
    assert cli.main(["export", "--checkpoint", run, "--to", "hf", str(hf)]) == 0
    for table, says in (
        (whole[1:], "lacks model.embed_tokens.weight"),
        (
            [*whole, WeightRow("", ("more.weight",), (2,))],
            "has, without a counterpart, more.weight",
        ),
        (
            rules("llama", vocab_size=9),
            "has another shape of lm_head.weight, model.embed_tokens.weight",
        ),
        ([], "cannot be read"),
    ):
        (hf / "model.safetensors").write_bytes(b"not a file of tensors")
        convert.write_tensors(
            hf,
            table,
            lambda rule: read(rule) if rule.megatron else torch.zeros(2),
            dtype=torch.float32,
        )
        capsys.readouterr()
        assert cli.main(["import", "--from", "hf", str(hf), str(tmp_path / "out")]) == 2
        assert says in capsys.readouterr().err


def test_names_of_gpt2_may_lack_the_prefix(tmp_path: Path) -> None:
    """As those of the published gpt2 do, which hold masks beside weights."""
    bare = [
        replace(rule, hf=tuple(name.removeprefix("transformer.") for name in rule.hf))
        for rule in rules("gpt2")
    ]
    mask = WeightRow("mask", ("h.0.attn.bias",), (1, 1, 4, 4))
    read = values("gpt2")
    weights = {rule: read(rule) for rule in bare} | {mask: torch.ones(mask.shape)}
    convert.write_tensors(tmp_path, list(weights), weights.__getitem__, dtype=torch.float32)
    assert (
        convert.open_tensors(tmp_path, prefix="transformer.").keys()
        == hf_shapes(rules("gpt2")).keys()
    )


def damage(found: Path) -> None:
    data = bytearray((found / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (found / "__0_0.distcp").write_bytes(data)


@pytest.mark.parametrize(
    ("command", "harm", "says"),
    [
        ("export --to hf OUT", damage, "is damaged: its CRC-32 is"),
        ("generate --prompt a", damage, "is damaged: its CRC-32 is"),
        ("eval --text TEXT", damage, "is damaged: its CRC-32 is"),
        (
            "export --to torch_dist OUT",
            lambda found: (found / "__0_0.distcp").unlink(),
            "cannot be read",
        ),
        (
            "export --to hf OUT",
            lambda found: (found / ".metadata").write_bytes(b"\x80garbage"),
            ".metadata",
        ),
        (
            "export --to hf OUT",
            lambda found: found.rename(found.with_name("iter_0000008")),
            "does not exist",
        ),
        (
            "export --to hf OUT",
            lambda found: (found.parent / folders.TRACKER).unlink(),
            "has no latest_checkpointed",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    harm: Callable[[Path], object],
    says: str,
) -> None:
    harm(saved(tmp_path / "run", "llama"))
    words = [{"OUT": str(tmp_path / "out")}.get(word, word) for word in command.split()]
    assert cli.main([words[0], "--checkpoint", str(tmp_path / "run"), *words[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()


def test_weights_that_the_arguments_do_not_tell_of_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama", num_layers=1)
    with pytest.raises(
        UserError, match=r"without a counterpart, decoder.layers.1.input_layernorm.weight"
    ):
        counterpart(Weights(tmp_path), None)


def test_without_a_tokenizer_there_is_a_warning_and_rows_that_pad_an_unknown_vocabulary_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "no")}
    found = saved(tmp_path / "run", "llama", vocab_size=None, **settings)
    assert counterpart(Weights(found), None).config["vocab_size"] == ROWS
    assert "without a tokenizer: " in capsys.readouterr().err
    for more in ([], ["--tokenizer", str(tmp_path / "no")]):
        assert cli.main(["generate", "--checkpoint", str(found), "--prompt", "a", *more]) == 2
        assert "tokenizer" in capsys.readouterr().err


def test_an_export_has_its_name_when_it_is_complete_and_replaces_nothing(tmp_path: Path) -> None:
    """It once deleted the run that it had read."""
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), convert.new_folder(out):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with convert.new_folder(out) as new:
        (new / "new").touch()
    with pytest.raises(UserError, match="exists already"), convert.new_folder(out):
        pass
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "new"]


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


def test_what_a_model_writes_does_not_reach_the_terminals_controls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    SafeStreamer(None).on_finalized_text(
        "a\x1b[2Jb\n\tc\x07\r\N{RIGHT-TO-LEFT OVERRIDE}\u3000\u200d"
    )
    assert capsys.readouterr().out == "a\ufffd[2Jb\n\tc\ufffd\ufffd\ufffd\u3000\u200d"


@pytest.mark.parametrize(
    "size",
    [1, 3, 4, 5, 7, 8, 9, 16, 17, 23],
)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_token_is_predicted_once_whatever_is_left_for_the_last_batch(
    size: int, batch: int
) -> None:
    """By a model that sees the last token alone, so that samples of four tokens change nothing."""
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    class Model:
        device = torch.device("cpu")

        def __call__(self, ids: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=table[ids])

    ids = np.random.default_rng(size).integers(0, 8, size).astype(np.uint16)
    before = [7, *ids[:-1].tolist()]
    wanted = -sum(
        float(table[a].log_softmax(0)[b])
        for a, b in zip(
            before,
            ids.tolist(),
            strict=True,
        )
    )
    found = list(losses(Model(), ids, first=7, length=4, batch=batch))
    assert sum(loss for loss, _ in found) == pytest.approx(wanted, rel=1e-5)
    assert found[-1][1] == size


@pytest.mark.parametrize(
    "command",
    [
        "import --from hf HF OUT",
        "generate --checkpoint HF --prompt a",
        "plan --hf HF --world-size 2",
    ],
)
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
    places = {"HF": str(hostile), "OUT": str(tmp_path / "out")}
    assert cli.main([places.get(word, word) for word in command.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "contains custom code" in line
    assert not (tmp_path / "ran").exists()
