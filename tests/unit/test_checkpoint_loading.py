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


NAMES = ("norm", "fc1_w", "fc1_v")


def adamw(prefix: str, *, step: float) -> dict[str, Any]:
    """torch's: a count for each parameter; a SwiGLU's fc1 is two, with settings of one."""
    state = {
        f"{prefix}{name}": {
            **ADAM,
            "step": torch.tensor(step),
        }
        for name in NAMES
    }
    settings = {f"{prefix}{name}": {"eps": 1e-8} for name in ("norm", "fc1")}
    return {"state": state, "param_to_group_meta": settings}


def fused(prefix: str, *, step: int) -> dict[str, Any]:
    """As Transformer Engine's FusedAdam keeps it: a count for each group."""
    state = {f"{prefix}{name}": dict(ADAM) for name in NAMES}
    settings = {
        f"{prefix}{name}": {
            "eps": 1e-8,
            "step": step,
        }
        for name in ("norm", "fc1")
    }
    return {"state": state, "param_to_group_meta": settings}


def test_counts_of_steps_in_another_form_are_missing_state(tmp_path: Path) -> None:
    """They started at zero without a word, and Adam's first updates were 2.2 times too large."""
    by_parameter, by_group = adamw("module.", step=7.0), fused("module.", step=7)
    of_parameters = written(tmp_path / "adamw", {"optimizer": by_parameter})
    of_groups = written(tmp_path / "fused", {"optimizer": by_group})
    every = {f"{name}.{slot}" for name, slots in by_group["state"].items() for slot in slots}
    assert checkpoint_loading._uncounted(by_group, of_parameters) == every
    assert checkpoint_loading._uncounted(by_group, of_groups) == set()
    assert checkpoint_loading._uncounted(by_parameter, of_parameters) == set()
    steps = {f"{name}.step" for name in by_group["state"]}
    assert content.compare(by_parameter["state"], of_groups) == (set(), every | steps)


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


def test_weights_that_the_model_lacks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untied output layer was dropped without a word: the loss rose from 1.741 to 5.025, with
    status 0.
    """
    names = ("module.a.weight", "module.output_layer.weight", "module.a._extra_state")
    entries = written(tmp_path, {"model": {name: torch.ones(2) for name in names}})

    def ask(*wanted: str, strict: bool = True) -> None:
        args = SimpleNamespace(strict_fsdp_dtensor_load=strict)
        left_over = checkpoint_loading._left_over(dict.fromkeys(wanted), entries)
        checkpoint_loading._require_no_more(left_over, tmp_path, args)

    ask(*names[:2])  # states of fp8 are never loaded
    with pytest.raises(
        UserError,
        match=r"lacks 1 of its weights: output_layer.weight; .*--no-strict-fsdp-dtensor-load",
    ):
        ask(names[0])
    ask(names[0], strict=False)
    assert "left out, 1: output_layer.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "ranks", "remedy"),
    [
        (50432, 1, "use --make-vocab-size-divisible-by 50432"),
        (50304, 2, "use --make-vocab-size-divisible-by 25152"),
        (50304, 5, "give this run its model flags"),
        (32000, 1, "give this run its model flags"),
    ],
)
def test_another_padding_of_the_vocabulary_names_the_flag(
    tmp_path: Path, rows: int, ranks: int, remedy: str
) -> None:
    """GPT-2's vocabulary has 50,304 rows, and 50,432 at tensor-parallel size 2."""
    name = "module.embedding.word_embeddings.weight"
    entries = written(tmp_path, {"model": {name: torch.ones(rows, 1)}})
    args = SimpleNamespace(vocab_size=50257, tensor_model_parallel_size=ranks)
    model = {name: torch.zeros(50400, 1)}
    with pytest.raises(UserError, match=remedy):
        checkpoint_loading._requested_state({"model": model}, entries, tmp_path, args)


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
