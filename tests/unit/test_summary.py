"""The figures of a run, from event files like those that Megatron's training loop writes."""

import json
import math

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_muon import cli
from megatron_muon.tools.train.records import figures_of, read_events, rose
from megatron_muon.tools.train.run_folder import places_of

SEQ_LENGTH, BATCH_SIZE, STEP_SECONDS = 128, 8, 0.25
SPEED = SEQ_LENGTH * BATCH_SIZE / STEP_SECONDS


def figures(run_dir):
    return figures_of(places_of(run_dir, {}))


def write_start(
    directory, steps, *, began=1000.0, loss=lambda step: 6.0 - step / 10, suffix="", points=()
):
    """Writes what one start of the training leaves: arguments, scalars, and (tag, step, value)."""
    given = {"seq_length": SEQ_LENGTH, "global_batch_size": BATCH_SIZE, "data_path": "['data/ü']"}
    with SummaryWriter(log_dir=str(directory), filename_suffix=suffix) as writer:
        for name, value in given.items():
            writer.add_text(name, str(value), global_step=steps[0] - 1, walltime=began)
        for step in steps:
            now = began + 30 + (step - steps[0] + 1) * STEP_SECONDS
            slow = 40 if step <= 10 else 1  # the first steps are slow
            scalars = {"lm loss": loss(step), "optimizer-share": 0.2 / slow}
            scalars["tokens-per-second"] = SPEED / slow
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step, walltime=now)
            writer.add_scalar("lm loss vs samples", loss(step), step * BATCH_SIZE, walltime=now)
        for tag, step, value in points:
            writer.add_scalar(tag, value, step)


@pytest.fixture
def run_dir(tmp_path):
    """Thirty iterations and a checkpoint."""
    write_start(tmp_path / "run" / "tensorboard", range(1, 31))
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("30\n")
    return tmp_path / "run"


def test_figures(run_dir):
    assert figures(run_dir) == {
        "iterations": 30,
        "tokens": 30 * BATCH_SIZE * SEQ_LENGTH,
        "loss_first": pytest.approx(5.9),
        "loss_last": pytest.approx(3.45),
        "diverged_at": None,
        "rose": False,
        "validation_loss": {},
        "validation_iteration": None,
        "skipped_iterations": 0,
        "tokens_per_second": pytest.approx(SPEED),
        "step_ms": pytest.approx(STEP_SECONDS * 1e3),
        "optimizer_share": pytest.approx(0.2),
        "train_seconds": pytest.approx(30 + 30 * STEP_SECONDS),
        "checkpoint": str(run_dir / "checkpoints" / "iter_0000030"),
    }


TAG = "lm loss validation"


@pytest.mark.parametrize(
    ("points", "losses"),
    [
        # Megatron writes the test set's loss under this tag, later, at the same iteration.
        (
            [(TAG, 15, 5.5), (TAG, 30, 4.5), (TAG, 30, 9.9)],
            {"validation": 4.5},
        ),
        (
            [
                (TAG, 30, 4.5),
                (f"{TAG} ppl", 30, 90.0),
                (f"{TAG} vs samples", 9, 8.0),
            ],
            {TAG[8:]: 4.5},
        ),
        (
            [(f"{TAG}-code", 30, 4.0), (f"{TAG}-prose", 30, 5.0)],
            {"code": 4.0, "prose": 5.0},
        ),
    ],
)
def test_validation_is_the_first_result_of_the_last_iteration(tmp_path, points, losses):
    write_start(tmp_path / "tensorboard", range(1, 31), points=points)
    found = figures(tmp_path)
    assert found["validation_loss"] == pytest.approx(losses)
    assert found["validation_iteration"] == 30


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.51, 5.52, 5.53], False),  # three steps of a warm-up say nothing
        ([16.5, 49.5, 148.5], True),
        ([2.1, 1.9] * 25, False),
        ([1.9, 2.1] * 25, False),  # fine-tuning that begins with a low batch
        ([2.1], False),
        ([5.5 + min(step, 20) / 4 for step in range(30)], True),
        ([5.0] * 20 + [math.nan] * 10, False),
        ([], False),
    ],
)
def test_a_loss_has_risen_only_if_noise_cannot_explain_it(losses, expected):
    assert rose(losses) is expected


def test_a_resumed_run_is_one_run(tmp_path):
    """Iterations 16 to 20 were lost with the first start: they count neither as losses nor
    twice.
    """
    write_start(tmp_path, range(1, 21), suffix=".1", loss=lambda step: 100.0 if step > 15 else 6.0)
    write_start(tmp_path, range(16, 31), suffix=".2", began=9000.0, loss=lambda step: 3.0)
    events = read_events(tmp_path)
    losses = events.points("lm loss")
    assert [point.step for point in losses] == list(range(1, 31))
    assert max(point.value for point in losses) == 6.0
    assert events.train_seconds == pytest.approx(2 * (30 + 15 * STEP_SECONDS))
    assert (events.samples, events.args["data_path"]) == (30 * BATCH_SIZE, "['data/ü']")


def test_the_command_prints_figures_and_writes_valid_json(run_dir, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert cli.main(["summary", str(run_dir), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "iterations           30\n" in out
    assert "tokens_per_second    4096\n" in out
    assert f"tensorboard --logdir {run_dir / 'tensorboard'}\n" in out
    assert cli.main(["summary", str(run_dir), "--json", str(tmp_path)]) == 2
    assert "megatron-muon: error: cannot write" in capsys.readouterr().err
    assert cli.main(["summary", str(tmp_path / "nowhere")]) == 2
    assert "no steps are logged in" in capsys.readouterr().err
    write_start(tmp_path / "nan/tensorboard", range(1, 3), loss=lambda step: math.nan)
    assert cli.main(["summary", str(tmp_path / "nan"), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["loss_last"], found["diverged_at"]) == (None, 1)
