"""A trace of `--profile` names the phases of the optimizer, within their iteration, on every
rank.
"""

from __future__ import annotations

import gzip
import json
from typing import NamedTuple

from tests.support import cli
from tests.support.training import Trainings

ONCE = cli.words(
    "optimizer grad-norm optimizer-inner-step muon adam optimizer-copy-main-to-model-params"
)
PHASES = {
    "muon/momentum",
    "muon/gather wave 0",
    "muon/gather_wait wave 0",
    "muon/send_back wave 0",
    "muon/scatter_wait wave 0",
    "muon/apply",
}


class Range(NamedTuple):
    """A named range of a trace."""

    name: str
    start: float
    end: float

    def contents(self, found):
        return [one for one in found if self.start <= one.start and one.end <= self.end]


def ranges(file):
    trace = json.loads(gzip.decompress(file.read_bytes()))
    events = (event for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    return [
        Range(
            event["name"],
            event["ts"],
            event["ts"] + event["dur"],
        )
        for event in events
    ]


def test_a_trace_names_the_phases_of_the_iterations_that_were_asked_for(ranks, tmp_path):
    places = cli.words("--tensorboard-dir run/tensorboard")
    batches = cli.words("--micro-batch-size 2 --global-batch-size 4")
    common = (
        *cli.TINY,
        *cli.make_corpus(tmp_path),
        *batches,
        *places,
        *cli.MUON,
    )
    profiled = "--train-iters 7 --profile --use-pytorch-profiler"
    steps = "--profile-step-start 5 --profile-step-end 7"
    training = Trainings(ranks, tmp_path, common)
    training(*cli.words(f"{profiled} {steps}")).checked()
    traces = tmp_path / "run" / "torch_profile"
    assert sorted(file.name for file in traces.iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    orthogonalized = 0
    for file in traces.iterdir():
        found = ranges(file)
        iterations = [one for one in found if one.name.startswith("iteration ")]
        assert {one.name for one in iterations} == {"iteration 5", "iteration 6"}
        for iteration in iterations:
            parts = iteration.contents(found)
            names = [part.name for part in parts]
            assert all(names.count(name) == 1 for name in ONCE), names
            assert {"forward_backward", "finish_grad_sync"} <= set(names)
            (muon,) = (part for part in parts if part.name == "muon")
            of_muon = {part.name for part in muon.contents(parts)}
            assert of_muon >= PHASES
            orthogonalized += "muon/orthogonalize wave 0" in of_muon
            assert not {name for name in names if name.startswith("muon/")} - of_muon
    assert orthogonalized >= 2  # of 3 layers on 2 ranks, an owner may have none in a wave
