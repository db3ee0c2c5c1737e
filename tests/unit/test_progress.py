"""What a run reports beside Megatron's log."""

import json
from types import SimpleNamespace

import pytest
import torch
from megatron.core.timers import Timers

from megatron_muon import cpu
from megatron_muon.megatron import LOSS, STATUS_FOLDER, TOLD, tell, tells
from megatron_muon.megatron.patches import progress as module
from megatron_muon.megatron.patches.progress import Clock, Progress, mean_loss, muon_rate

ADAM = {"optimizer": "adam", "lr": 0.001, "default_config": True}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Megatron's, of a run that writes its facts."""
    found = SimpleNamespace(tensorboard_dir=str(tmp_path))
    monkeypatch.setattr(module, "get_args", lambda: found)
    return found


def test_muons_rate_is_shown_where_megatron_does_not_log_it():
    """With --muon-lr the log and TensorBoard had Adam's rate alone."""
    own = {"lr": 0.02, "default_config": False}
    assert muon_rate([ADAM, own]) == 0.02
    assert muon_rate([ADAM, {**own, "default_config": True}]) is None  # one schedule for both
    # Adam's embeddings with --decoupled-lr
    assert muon_rate([{**ADAM, "default_config": False}]) is None


def test_a_step_that_is_not_finite_is_told_before_the_run_ends(tmp_path, monkeypatch, settings):
    """Megatron ends it before it is logged; without --save in an error of its own about where to
    save.
    """
    told = []
    monkeypatch.setattr(module, "tell", lambda event, **facts: told.append((event, facts)))
    progress = Progress(on_gpu=False)
    fine = ({}, 0, False, False, 0)
    assert progress.step(lambda iteration: fine, iteration=5) == fine
    progress.step(lambda iteration: ({}, True, True, True, 16), iteration=6)
    assert told == [("diverged", {"step": 7})]
    # where no launcher listens
    assert json.loads((tmp_path / "facts.json").read_text()) == {"diverged_at": 7}


def test_parameters_are_counted_as_megatron_counts_them(tmp_path, settings):
    """Megatron-FSDP's parameters are whole over tensor-parallel ranks; a rank's own part stands
    beside them.
    """
    chunk = torch.nn.Linear(8, 6, bias=False)
    chunk.weight.orig_param = torch.empty(3, 8)
    Progress(on_gpu=False).watch(
        lambda *_: SimpleNamespace(),
        None,
        [chunk, torch.nn.Linear(2, 2)],
    )
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["parameters"] == 3 * 8 + 2 * 2 + 2
    assert torch.__version__.startswith(facts["versions"]["torch"])
    assert list(tmp_path.iterdir()) == [tmp_path / "facts.json"]  # it is written aside and renamed


def test_the_mean_loss_is_that_of_megatrons_line():
    """Skipped steps count for nothing; the sums are Megatron's, before it adds this step."""
    totals = {"lm loss": torch.tensor([5.0]), "advanced iterations": 2, "skipped iterations": 1}
    assert mean_loss({"lm loss": torch.tensor([1.0])}, totals, skipped=False) == 2.0
    assert mean_loss({"lm loss": torch.tensor([9.0])}, totals, skipped=True) == 2.5
    assert totals["lm loss"] == 5.0
    first = {"lm loss": torch.tensor(4.0)}
    assert mean_loss(first, {}, skipped=False) == 4.0
    assert mean_loss(first, {}, skipped=True) is None
    # another pipeline stage
    assert mean_loss(totals={"advanced iterations": 1}, losses={}, skipped=False) is None


def test_speed_is_that_of_the_steps_and_the_time_left_counts_evaluations_and_saves(settings):
    """The first step, which is slow, is left out."""
    vars(settings).update(global_batch_size=4, seq_length=32, train_iters=40)
    progress = Progress(on_gpu=False)
    assert progress._speed(settings, Clock(1, 100.0, 9.0, 8.0)) == {}
    assert progress._speed(settings, Clock(10, 118.0, 18.0, 10.25)) == {
        "tokens_per_s": 128.0,
        "mfu": None,
        "optimizer_share": 0.25,
        "seconds_left": 60.0,
    }
    assert progress._speed(settings, Clock(20, 157.0, 28.0, None))["seconds_left"] == 60.0


def test_an_evaluation_and_a_save_are_told_and_measured(tmp_path, monkeypatch, settings):
    """Two sets and a test set, under the names and at the steps that Megatron writes them."""
    vars(settings).update(
        multiple_validation_sets=True, validation_set_names=["code", "text"], save="s"
    )
    for name, value in (
        (STATUS_FOLDER, str(tmp_path)),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    (tmp_path / TOLD).touch()
    progress = Progress(on_gpu=False)

    def results(prefix, forward_step, data, model, iteration, *rest):
        for loss in (2.0, 3.0):
            progress.evaluate_set(lambda *_, loss=loss: ({LOSS: torch.tensor(loss)}, None, False))

    for after in ("", " on validation set", " on test set"):
        progress.evaluate(results, f"iteration 20{after}", None, None, None, 20, None)
    settings.validation_set_names = None
    module.save(lambda iteration: None, 20)
    told = [json.loads(line) for line in (tmp_path / TOLD).read_text().splitlines()]
    validations = [
        (
            e["step"],
            e["loss"],
            e["what"],
        )
        for e in told
        if e["event"] == "validation"
    ]
    sets = ((2.0, "code"), (3.0, "text"))
    kinds = ("validation", "test")
    assert validations == [
        (20, loss, f"{kind} loss {name}") for kind in kinds for loss, name in sets
    ]
    (saved,) = (event for event in told if event["event"] == "saved")
    assert (saved["step"], saved["folder"]) == (20, "s")
    stages = [event["stage"] for event in told if event["event"] == "stage"]
    assert stages == [*["evaluating", None] * 2, "saving a checkpoint", None]


@pytest.mark.parametrize(
    ("evaluated_at", "in_time", "losses"),
    [
        (20, True, ["validation"]),
        (10, True, ["validation", "final validation"]),
        (20, False, ["final validation"]),
    ],
)
def test_the_last_step_is_evaluated_once(monkeypatch, settings, evaluated_at, in_time, losses):
    """Megatron evaluates it again after training, on other samples: two losses of one step, 1.9050
    and 1.9729.
    """
    told = []
    monkeypatch.setattr(module, "tell", lambda event, **facts: told.append((event, facts)))
    cpu.install(force=True)
    timers = Timers(0, "minmax")
    monkeypatch.setattr(module, "get_timers", lambda: timers)
    progress = Progress(on_gpu=False)

    def results(prefix, forward_step, data, model, iteration, *rest):
        timers("evaluate", log_level=0).start()
        if in_time or " set" in prefix:
            progress.evaluate_set(lambda *_: ({LOSS: torch.tensor(2.0)}, None, False))
            timers("evaluate").stop()
        else:
            # --exit-duration-in-mins; the timer is left running
            progress.evaluate_set(lambda *_: (None, None, True))

    progress.evaluate(results, f"iteration {evaluated_at}", None, None, None, evaluated_at, None)
    progress.evaluate(results, "iteration 20 on validation set", None, None, None, 20, None)
    assert [
        facts["what"].removesuffix(" loss") for event, facts in told if event == "validation"
    ] == losses


def test_one_rank_of_a_machine_tells_and_only_where_it_was_asked(tmp_path, monkeypatch):
    for name, value in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(STATUS_FOLDER, raising=False)
    assert not tells()
    monkeypatch.setenv(STATUS_FOLDER, str(tmp_path))
    (tmp_path / TOLD).touch()
    tell("stage", step=1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    tell("stage", step=2)
    assert json.loads((tmp_path / TOLD).read_text()) == {"event": "stage", "step": 2}
    monkeypatch.setenv(STATUS_FOLDER, str(tmp_path / "gone"))
    tell("stage", step=3)  # the launcher was killed: training goes on
    monkeypatch.setenv(STATUS_FOLDER, str(tmp_path / "unread"))
    (tmp_path / "unread").mkdir()
    assert not tells()  # a node that no `train` watches wants the ends of ranks alone
