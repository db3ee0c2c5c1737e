"""What of a checkpoint a run asks for, on real files of one process: other names, other optimizers,
other models.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.checkpoint import content
from megatron_muon.errors import UserError
from megatron_muon.megatron.checkpoint import loading as checkpoint_loading

NOTHING: tuple[set[str], set[str]] = (set(), set())
ADAM = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def written(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's entries."""
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return content.read_entries(folder)


def adamw(
    prefix: str, *, step: float, names: tuple[str, ...] = ("norm", "fc1_w", "fc1_v")
) -> dict[str, Any]:
    """torch's: a count for each parameter; a SwiGLU's fc1 is two, with settings of one."""
    # zeros in a run, something in a checkpoint
    slots = {name: value + 1 - step for name, value in ADAM.items()}
    state = {f"{prefix}{name}": {**slots, "step": torch.tensor(step)} for name in names}
    return {"state": state, "param_to_group_meta": groups(prefix, {"eps": 1e-8})}


def groups(prefix: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a group by parameter; as megatron-core makes them, one dict for all of a
    group.
    """
    return {f"{prefix}{name}": settings for name in ("norm", "fc1")}


def fused(
    prefix: str, *, step: Any, names: tuple[str, ...] = ("norm", "fc1_w", "fc1_v")
) -> dict[str, Any]:
    """As Transformer Engine's FusedAdam keeps it: a count for each group."""
    return {
        "state": {
            f"{prefix}{name}": {slot: torch.clone(value) for slot, value in ADAM.items()}
            for name in names
        },
        "param_to_group_meta": groups(prefix, {"eps": 1e-8, "step": step}),
    }


@pytest.mark.parametrize("capturable", [False, True])
def test_a_count_by_parameter_goes_on_as_a_count_by_group(
    tmp_path: Path, capturable: bool, capsys: Any
) -> None:
    """It was dropped without a word, and Adam's first updates were up to 2.2 times too large."""
    entries = written(tmp_path, {"optimizer": adamw("module.", step=7.0)})
    run = fused("module.", step=torch.zeros(1, dtype=torch.int) if capturable else 0)
    assert content.compare(run["state"], entries) == NOTHING
    asked, left = checkpoint_loading.carry_step_counts_over(run, set(), entries, tmp_path)
    assert (left, capsys.readouterr().out) == (("step",), "")
    count = run["param_to_group_meta"]["module.norm"]["step"]
    assert count == 7
    assert isinstance(count, torch.Tensor) == capturable
    rest = content.without_fresh(asked, set(), entries, keep=left)
    assert all(meta.keys() == {"eps"} for meta in rest["param_to_group_meta"].values())


@pytest.mark.parametrize(
    "step",
    [7, torch.full((1,), 7, dtype=torch.int)],
)
def test_a_count_by_group_goes_on_as_a_count_by_parameter(tmp_path: Path, step: Any) -> None:
    """It was said to be missing, and the run refused."""
    entries = written(tmp_path, {"optimizer": fused("module.", step=step)})
    run = adamw("module.", step=0.0)
    assert content.compare(run["state"], entries) == NOTHING
    asked, left = checkpoint_loading.carry_step_counts_over(run, set(), entries, tmp_path)
    assert left == ()
    assert {float(slots["step"]) for slots in run["state"].values()} == {7.0}
    assert all(slots.keys() == ADAM.keys() for slots in asked["state"].values())


@pytest.mark.parametrize("kept", [adamw("module.", step=7.0), fused("module.", step=7)])
def test_the_same_form_is_asked_for_as_it_is(tmp_path: Path, kept: Any) -> None:
    entries = written(tmp_path, {"optimizer": kept})
    assert checkpoint_loading.carry_step_counts_over(kept, set(), entries, tmp_path) == (kept, ())


def test_counts_that_differ_within_a_group_are_told(tmp_path: Path, capsys: Any) -> None:
    stored = adamw("module.", step=7.0)
    stored["state"]["module.norm"]["step"] = torch.tensor(3.0)
    entries = written(tmp_path, {"optimizer": stored})
    run = fused("module.", step=0)
    checkpoint_loading.carry_step_counts_over(run, set(), entries, tmp_path)
    assert run["param_to_group_meta"]["module.norm"]["step"] == 7
    assert "the checkpoint has 3 to 7 steps in one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("theirs", "ours"), [("module.", "module.module."), ("module.module.", "module.")]
)
def test_names_of_another_precision(tmp_path: Path, theirs: str, ours: str) -> None:
    """bf16 puts one more `module.` in front of the optimizer's names: all of its state was said to
    be missing.
    """
    entries = written(
        tmp_path, {"optimizer": adamw(theirs, step=7.0), "model": {"module.norm": torch.ones(2)}}
    )
    run = adamw(ours, step=0.0)
    assert content.wrappers(content.optimized(entries)) == theirs
    assert content.wrappers(run["param_to_group_meta"]) == ours
    renamed = content.renamed(run, ours, theirs)
    assert content.compare(renamed["state"], entries) == NOTHING
    asked = content.without_fresh(renamed, set(), entries)
    assert asked["state"].keys() == adamw(theirs, step=0.0)["state"].keys()
    load({"optimizer": asked}, checkpoint_id=str(tmp_path), no_dist=True)
    assert {float(slots["step"]) for slots in run["state"].values()} == {7.0}


LION = {"exp_avg": torch.ones(2)}


@pytest.mark.parametrize(
    ("stored", "wanted", "settings", "kind"),
    [
        (LION, {**ADAM, "step": torch.tensor(0.0)}, {"lr": 1.0}, "replaced"),
        ({**ADAM, "step": torch.tensor(7.0)}, LION, {"eps": 1e-8}, "replaced"),
        (LION, LION, {"lr": 1.0}, None),
    ],
)
def test_lion_and_adam_start_each_other_afresh(
    tmp_path: Path, stored: Any, wanted: Any, settings: Any, kind: str | None
) -> None:
    """Lion's into Adam was refused as damaged; Adam's into Lion went on with Adam's betas, without
    a word.
    """
    state = {"state": {"module.norm": stored}, "param_to_group_meta": {"module.norm": settings}}
    entries = written(tmp_path, {"optimizer": state})
    lost = {f"module.norm.{slot}" for slot in wanted}
    expected = (lost if kind == "replaced" else set(), lost if kind == "absent" else set())
    assert content.compare({"module.norm": wanted}, entries) == expected


def test_only_what_another_optimizer_kept_starts_afresh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lion, adam = {"exp_avg": torch.ones(2)}, {**ADAM, "step": torch.tensor(7.0)}
    settings = {name: {"lr": 1.0} for name in ("module.norm", "module.fc1")}
    model = {name: torch.ones(2) for name in settings}
    stored = {"state": {"module.norm": lion, "module.fc1": adam}, "param_to_group_meta": settings}
    entries = written(tmp_path, {"model": model, "optimizer": stored})
    run = {"state": {name: {**adam} for name in settings}, "param_to_group_meta": settings}
    args = SimpleNamespace(
        strict_fsdp_dtensor_load=True,
        muon_allow_missing_state=False,
        override_opt_param_scheduler=False,
        tensor_model_parallel_size=1,
    )
    asked = checkpoint_loading._requested_state(
        {"model": model, "optimizer": run}, entries, tmp_path, args
    )
    assert asked["optimizer"]["state"].keys() == {"module.fc1"}
    assert (
        "start at zero, because another optimizer or layout wrote this checkpoint: norm"
        in capsys.readouterr().out
    )


def test_weights_that_the_model_lacks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untied output layer was dropped without a word: the loss rose from 1.741 to 5.025, with
    status 0.
    """
    names = ("module.a.weight", "module.output_layer.weight", "module.a._extra_state")
    entries = written(tmp_path, {"model": {name: torch.ones(2) for name in names}})

    def ask(*wanted: str, strict: bool = True) -> Any:
        args = SimpleNamespace(strict_fsdp_dtensor_load=strict)
        model = {name: torch.zeros(2) for name in wanted}
        return checkpoint_loading._requested_state({"model": model}, entries, tmp_path, args)

    ask(*names[:2])  # states of fp8 are never loaded
    with pytest.raises(
        UserError,
        match=r"lacks 1 of its weights: output_layer.weight; .*--no-strict-fsdp-dtensor-load",
    ):
        ask(names[0])
    ask(names[0], strict=False)
    assert "left out, 1: output_layer.weight" in capsys.readouterr().out


def test_what_is_missing() -> None:
    state = ("a.momentum_buffer", "b.exp_avg", "b.exp_avg_sq", "b.step", "d.exp_avg")
    settings = (content.setting("a", "lr"), content.setting("d", "eps"))
    entries = dict.fromkeys([*(f"optimizer.state.{name}" for name in state), *settings])
    wanted = {name: {"momentum_buffer": 0} for name in "abc"}
    wanted["d"] = dict.fromkeys(["exp_avg", "exp_avg_sq", "step"], 0)
    adaptive = content.compare({"a": {"momentum_buffer": 0, "moment2_buffer": 0}}, entries)
    assert adaptive == ({"a.momentum_buffer", "a.moment2_buffer"}, set())
    replaced, absent = content.compare(wanted, entries)
    # half a state is none; Adam's without its second half may be Lion's
    assert replaced == {"b.momentum_buffer", "d.exp_avg", "d.exp_avg_sq", "d.step"}
    assert absent == {"c.momentum_buffer"}
    meta = {name: {"lr": 1.0, "momentum": 0.9, "is_expert_parallel": True} for name in "abcd"}
    asked = content.without_fresh(
        {"state": wanted, "param_to_group_meta": meta}, {"b", "c", "d"}, entries
    )
    assert asked == {
        "state": {"a": {"momentum_buffer": 0}},
        "param_to_group_meta": {"a": {"lr": 1.0}},
    }
    slots = content.optimizer_slots(entries)
    assert [content.optimizer_of(slots[name]) for name in "abd"] == ["muon", "adam", "lion"]


def test_state_of_another_size_starts_afresh() -> None:
    """NorMuon keeps a number for each row, AdaMuon one for each element."""
    stored = SimpleNamespace(size=torch.Size((4, 2)))
    entries = dict.fromkeys(
        ("optimizer.state.a.momentum_buffer", "optimizer.state.a.moment2_buffer"), stored
    )
    whole, by_row = torch.zeros(4, 2), torch.zeros(4, 1)
    adamuon = {"momentum_buffer": whole, "moment2_buffer": whole}
    assert content.compare({"a": adamuon}, entries) == NOTHING
    other = content.compare({"a": {"momentum_buffer": whole, "moment2_buffer": by_row}}, entries)
    assert other == ({"a.momentum_buffer", "a.moment2_buffer"}, set())
    halves = {
        "b_w": {"momentum_buffer": whole, "moment2_buffer": torch.zeros(8, 1)},
        "b_v": {"momentum_buffer": whole},
    }
    assert content.laid_out_by_rank({"a": adamuon, **halves}) == {"b_w", "b_v"}
