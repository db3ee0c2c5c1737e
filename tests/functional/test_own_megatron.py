"""`megatron_muon.enable()` in a Megatron script and in a training loop of one's own: as
pretrain_gpt.py, or nothing.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_muon.errors import UserError
from tests.functional.test_megatron_matrix_optimizers import FOR_CLASSES
from tests.support import cli, model
from tests.support.case import Case, batches
from tests.support.cases import MOE
from tests.support.pool import Pool
from tests.support.training import Trainings

SCRIPT = cli.ROOT / "tests" / "support" / "own_megatron.py"
PAGE = (cli.ROOT / "docs" / "own-megatron.md").read_text("utf-8")
MUON, ON_CPU = (
    tuple(block.split()) for block in re.findall(r"^((?:    --.*\n)+)", PAGE, re.MULTILINE)
)
"""The flags that the page shows."""
assert MUON[:2] == ("--optimizer", "muon")
FSDP = MUON[2:]
STEPS = ("--global-batch-size", "4", "--train-iters", "4")


def own(
    folder: Path,
    enabled: str,
    *flags: str,
    cold: bool = False,
) -> cli.Run:
    """Run the script on two ranks."""
    torchrun = cli.words("-m torch.distributed.run --standalone --nproc-per-node 2")
    line = [sys.executable, *torchrun, str(SCRIPT), *cli.TINY, *STEPS, *ON_CPU, *flags]
    return cli.run(line, folder, env={"ENABLE": enabled}, cold=cold).checked()


def weights(run: cli.Run) -> set[str]:
    """A checksum for each rank."""
    found = set(re.findall(r"weights of rank (\d: \d+)", run.output))
    assert len(found) == 2, run.tail
    return found


@pytest.mark.wide
def test_a_script_of_ones_own_trains_saves_and_resumes_as_pretrain_gpt(ranks, tmp_path, corpus):
    """It is enabled first and cold, then after Megatron's functions were imported by name, and
    twice.
    """
    # without fast bf16, pretrain_gpt.py fills it in
    precision = cli.words("--muon-fp32-matmul-prec highest")
    flags = (*corpus, *MUON, *precision, *cli.words("--save checkpoints --save-interval 3"))
    (tmp_path / "ours").mkdir()
    ours = Trainings(
        ranks,
        tmp_path / "ours",
        (*cli.TINY, *STEPS, *flags),
    )().checked()
    first = own(tmp_path, "first", *flags, "--exit-interval", "3", cold=True)
    resumed = own(tmp_path, "last", *flags, "--load", "checkpoints")
    assert len(ours.losses) == 4
    assert ours.losses[3] < ours.losses[0] - 0.5
    assert first.losses == ours.losses[:3]
    assert resumed.losses == ours.losses[3:]
    for run in (first, resumed):
        (patched,) = re.findall(
            "^megatron-muon: patched for this run: (.*)$", run.output, re.MULTILINE
        )
        assert {"patch_megatron_fsdp", "save_beside_and_rename", "run_no_pickles"} <= set(
            patched.split(", ")
        )


@pytest.mark.wide
def test_adam_is_the_same_to_the_last_bit_whether_enabled_or_not(tmp_path, corpus):
    before, after = (own(tmp_path, enabled, *corpus, *FSDP) for enabled in ("", "last"))
    assert before.losses == after.losses
    assert weights(before) == weights(after)
    assert weights(before) != weights(own(tmp_path, "", *corpus, *FSDP, "--seed", "8"))
    assert "megatron-muon" not in after.output


def own_loop(rank: int, world_size: int, *, settings: dict[str, Any]) -> list[str]:
    """In a worker: what differs where Megatron's own factory makes the optimizer of a plain config,
    enabled that late.

    Gradients of experts are reduced by one rank each here, which megatron-core 0.19 does wrongly.
    """
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import megatron_muon

    case = MOE.but(expert_parallel=2, optimizer={"clip_grad": 0.3, **settings})

    def from_megatron(case: Case, wrapped: torch.nn.Module, groups: Any) -> Any:
        theirs = {field.name for field in dataclasses.fields(OptimizerConfig)}
        config = OptimizerConfig(
            use_distributed_optimizer=True,
            **{name: case.settings[name] for name in theirs & case.settings.keys()},
        )
        megatron_muon.enable(
            **{name: case.settings[name] for name in case.settings.keys() - theirs}
        )
        return get_megatron_optimizer(config, [wrapped], None, pg_collection=groups)

    seen: list[dict[str, Any]] = []
    for build in (model._optimizer, from_megatron):
        with mock.patch.object(model, "_optimizer", build):
            trainer = model.Trainer(case)
        results = [trainer.train(tokens, micro_batches=2) for tokens in batches(3)]
        seen.append(
            {
                **trainer.bits(),
                "steps": torch.tensor([(loss, *result[:2]) for loss, result in results]),
            }
        )
        # the next model is wrapped in what megatron-core ships
        sys.modules["__main__"].installed.undo()
    assert seen[0].keys() == seen[1].keys()
    first, second = seen
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize(
    "settings",
    [
        {"muon_momentum_dtype": "bf16"},
        pytest.param(
            {**FOR_CLASSES, "optimizer": "soap", "matrix_optimizer_args": ["use_kl_shampoo=False"]},
            marks=pytest.mark.wide,
        ),
    ],
)
def test_a_loop_of_ones_own_trains_as_with_this_packages_factory(
    ranks: Pool, settings: dict[str, Any]
) -> None:
    """Megatron-FSDP was patched before the model was wrapped, or not at all."""
    assert ranks(2, own_loop, settings=settings) == [[], []]


def misused(rank: int, world_size: int) -> list[str]:
    """In a worker: errors of calls that would do nothing."""
    import torch
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    from megatron.training import global_vars

    import megatron_muon

    def refused(**settings: Any) -> str:
        with pytest.raises(UserError) as error:
            megatron_muon.enable(**settings)
        return str(error.value)

    found = [refused(muon_exchnage=1), refused(muon_nesterov=1)]
    global_vars._GLOBAL_ARGS = object()
    found.append(refused())
    global_vars._GLOBAL_ARGS = None
    shard = torch.nn.Parameter(torch.ones(2, 2))
    shard.megatron_fsdp_dist_index = None  # type: ignore[attr-defined]  # as Megatron-FSDP marks it
    made = [TensorParallelMuon([torch.nn.Parameter(torch.ones(2, 2)), shard])]
    found.append(refused())
    made.clear()
    megatron_muon.enable(muon_lr=0.1)
    megatron_muon.enable()
    return [*found, refused(muon_lr=0.2)]


def test_a_call_that_would_do_nothing_is_one_line(ranks: Pool) -> None:
    (errors,) = ranks(1, misused)
    late = "comes too late; call megatron_muon.enable() earlier, before Megatron parses flags"
    starts = [
        "has no setting muon_exchnage; did you mean muon_exchange?",
        "has no setting muon_nesterov; Megatron's own belong in its config",
        late,
        late,
        "was called before, with {'muon_lr': 0.1}; call it once",
    ]
    for error, start in zip(errors, starts, strict=True):
        assert error.startswith(f"megatron_muon.enable {start}")
