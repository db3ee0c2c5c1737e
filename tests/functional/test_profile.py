"""A trace of `--profile` names the phases of the optimizer, within their iteration, on every
rank.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings

ONCE = (
    "optimizer",
    "grad-norm",
    "optimizer-inner-step",
    "muon",
    "adam",
    "optimizer-copy-main-to-model-params",
)
PHASES = (
    "momentum",
    "gather wave 0",
    "gather_wait wave 0",
    "send_back wave 0",
    "scatter_wait wave 0",
    "apply",
)


def ranges(file: Path) -> list[tuple[str, float, float]]:
    """The named ranges of a trace: name, begin and end."""
    trace: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    events = (event for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    return [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events]


def test_a_trace_names_the_phases_of_the_iterations_that_were_asked_for(
    ranks: Pool, tmp_path: Path
) -> None:
    batches = ("--micro-batch-size", "2", "--global-batch-size", "4")
    places = (
        "--tensorboard-dir",
        "run/tensorboard",
        "--save",
        "saves",
        "--save-interval",
        "3",
        "--load",
        "saves",
    )
    training = Trainings(
        ranks, tmp_path, (*cli.TINY, *cli.make_corpus(tmp_path), *batches, *places, *cli.MUON)
    )
    training("--train-iters", "3").checked()
    traces = tmp_path / "run" / "torch_profile"
    assert not traces.exists()

    steps = (
        "--profile",
        "--use-pytorch-profiler",
        "--profile-step-start",
        "5",
        "--profile-step-end",
        "7",
    )
    # goes on at 3
    training("--train-iters", "7", "--override-opt-param-scheduler", *steps).checked()
    assert sorted(file.name for file in traces.iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    orthogonalised = 0
    for file in traces.iterdir():
        found = ranges(file)
        iterations = {
            name: (start, end) for name, start, end in found if name.startswith("iteration ")
        }
        assert set(iterations) == {"iteration 5", "iteration 6"}
        for start, end in iterations.values():
            within = [each for each in found if start <= each[1] and each[2] <= end]
            names = [name for name, *_ in within]
            assert all(names.count(name) == 1 for name in ONCE), names
            assert {"forward_backward", "finish_grad_sync"} <= set(names)
            (muon,) = (each for each in within if each[0] == "muon")
            of_muon = {each[0] for each in within if muon[1] <= each[1] and each[2] <= muon[2]}
            assert {f"muon/{phase}" for phase in PHASES} <= of_muon
            orthogonalised += "muon/orthogonalize wave 0" in of_muon
            assert not {name for name in names if name.startswith("muon/")} - of_muon
    assert orthogonalised >= 2  # of 3 layers on 2 ranks, an owner may have none in a wave
