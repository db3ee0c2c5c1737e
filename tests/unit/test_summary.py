"""`megatron-muon summary`: the figures, from event files like those that Megatron's training loop
writes.
"""

import json
import math

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_muon import cli
from megatron_muon.errors import UserError
from megatron_muon.tools.train.records import read_events, read_record
from megatron_muon.tools.train.run_summary import rows

SEQ_LENGTH, BATCH_SIZE, STEP_SECONDS, OPTIMIZER_SECONDS = 128, 8, 0.25, 0.05


def loaded(run_dir):
    return read_record(run_dir, needs_steps=True)


def write_start(
    directory,
    steps,
    *,
    began=1000.0,
    timers=True,
    loss=lambda step: 6.0 - step / 10,
    suffix="",
    points=(),
    **args,
):
    """Writes what one start of the training leaves: its arguments, the scalars of each step, (tag,
    step, value).
    """
    given = {
        "seq_length": SEQ_LENGTH,
        "optimizer": "muon",
        "world_size": 2,
        "data_path": "['data/ü']",
        **args,
    }
    with SummaryWriter(log_dir=str(directory), filename_suffix=suffix) as writer:
        writer.add_text("facts/plan", "of an earlier version", walltime=began - 1)
        for name, value in given.items():
            writer.add_text(name, str(value), global_step=steps[0] - 1, walltime=began)
        for step in steps:
            now = began + 30 + (step - steps[0] + 1) * STEP_SECONDS
            scalars = {"lm loss": loss(step), "batch-size": BATCH_SIZE}
            if timers:  # the first steps are slow; the summary is about the others
                slow = 40 if step <= 10 else 1
                scalars |= {
                    "iteration-time": STEP_SECONDS * slow,
                    "optimizer-time": OPTIMIZER_SECONDS,
                }
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step, walltime=now)
            writer.add_scalar("lm loss vs samples", loss(step), step * BATCH_SIZE, walltime=now)
        for tag, step, value in points:
            writer.add_scalar(tag, value, step)


@pytest.fixture
def run_dir(tmp_path):
    """Thirty iterations with timers and a checkpoint."""
    write_start(tmp_path / "run" / "tensorboard", range(1, 31))
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("30\n")
    return tmp_path / "run"


def test_figures(run_dir):
    assert loaded(run_dir).figures == {
        "iterations": 30,
        "tokens": 30 * BATCH_SIZE * SEQ_LENGTH,
        "loss_first": pytest.approx(5.9),
        "loss_last": pytest.approx(sum(6.0 - step / 10 for step in range(21, 31)) / 10),
        "diverged_at": None,
        "validation_loss": {},
        "validation_iteration": None,
        "skipped_iterations": 0,
        "tokens_per_second": pytest.approx(BATCH_SIZE * SEQ_LENGTH / STEP_SECONDS),
        "step_ms": pytest.approx(STEP_SECONDS * 1e3),
        "optimizer_share": pytest.approx(OPTIMIZER_SECONDS / STEP_SECONDS),
        "train_seconds": pytest.approx(30 + 30 * STEP_SECONDS),
        "checkpoint": str(run_dir / "checkpoints" / "iter_0000030"),
    }


def test_speed_without_timers_comes_from_the_times_of_the_losses(tmp_path):
    write_start(tmp_path / "tensorboard", range(1, 31), timers=False)
    summary = loaded(tmp_path)
    assert summary.step_ms == pytest.approx(STEP_SECONDS * 1e3)
    assert summary.optimizer_share is None
    assert "optimizer" not in dict(rows(summary))


def test_the_first_step_of_a_start_is_no_measure_of_the_optimizer(tmp_path):
    """Megatron divides its time by the log interval: the optimizer seemed ten times as fast as it
    is.
    """
    points = [
        ("optimizer-time", step, OPTIMIZER_SECONDS / (1 if step % 10 == 0 else 10))
        for step in (1, 10, 11, 20)
    ]
    write_start(
        tmp_path / "tensorboard", range(1, 26), timers=False, points=points, log_interval=10
    )
    summary = loaded(tmp_path)
    assert summary.optimizer_share == pytest.approx(OPTIMIZER_SECONDS / STEP_SECONDS)
    assert summary.optimizer_ms == pytest.approx(OPTIMIZER_SECONDS * 1e3)
    assert dict(rows(summary))["optimizer"] == "20% of the step"


def test_validation_is_the_first_result_of_the_last_iteration(tmp_path):
    """Megatron writes the test set's loss under the validation set's tag, after it, at the same
    iteration.
    """
    tag = "lm loss validation"
    points = [
        (tag, 15, 5.5),
        (tag, 30, 4.5),
        (tag, 30, 9.9),
        (f"{tag} ppl", 30, 90.0),
        (f"{tag} vs samples", 240, 4.5),
    ]
    write_start(tmp_path / "one/tensorboard", range(1, 31), points=points)
    assert loaded(tmp_path / "one").validation_by_set == {"validation": pytest.approx(4.5)}
    assert dict(rows(loaded(tmp_path / "one")))["validation loss"] == "4.500 at iteration 30"
    sets = [(f"{tag}-code", 30, 4.0), (f"{tag}-prose", 30, 5.0)]
    write_start(tmp_path / "two/tensorboard", range(1, 31), points=sets)
    assert loaded(tmp_path / "two").validation_by_set == {
        "code": pytest.approx(4.0),
        "prose": pytest.approx(5.0),
    }
    assert loaded(tmp_path / "two").validation_last == pytest.approx(4.5)


def test_a_run_without_a_launcher_says_in_its_facts_where_it_diverged(run_dir):
    """In a job Megatron's end for a number that is not finite left a run that was merely
    unfinished.
    """
    (run_dir / "tensorboard" / "facts.json").write_text('{"diverged_at": 31}')
    assert (loaded(run_dir).diverged_at, loaded(run_dir).diverged) == (31, True)


def test_a_diverged_run_says_so_and_its_json_is_valid(tmp_path):
    write_start(
        tmp_path / "tensorboard", range(1, 31), loss=lambda step: math.nan if step > 20 else 5.0
    )
    assert (loaded(tmp_path).diverged_at, loaded(tmp_path).rose, loaded(tmp_path).diverged) == (
        21,
        False,
        True,
    )
    assert "from iteration 21 on" in dict(rows(loaded(tmp_path)))["warning"]
    assert cli.main(["summary", str(tmp_path), "--json", str(tmp_path / "figures.json")]) == 0
    assert json.loads((tmp_path / "figures.json").read_text())["loss_last"] is None


def noisy(level, noise):
    return lambda step: level + noise * (1 if step % 2 else -1)


@pytest.mark.parametrize(
    ("loss", "steps", "rose"),
    [
        (lambda step: 5.5 + step / 100, 3, False),  # three steps of a warm-up say nothing
        (lambda step: 5.5 * 3**step, 3, True),
        (noisy(2.0, -0.1), 50, False),  # fine-tuning that begins with a low batch
        (noisy(2.0, 0.1), 1, False),
        (lambda step: 5.5 + min(step, 20) / 4, 30, True),
    ],
)
def test_a_loss_has_risen_only_where_noise_cannot_explain_it(tmp_path, loss, steps, rose):
    write_start(tmp_path / "tensorboard", range(1, steps + 1), loss=loss)
    assert loaded(tmp_path).rose is rose
    assert ("rose" in dict(rows(loaded(tmp_path))).get("warning", "")) is rose
    assert loaded(tmp_path).diverged is rose


def test_a_resumed_run_is_one_run(tmp_path):
    """Iterations 16 to 20 were lost with the first start; they count neither as losses nor twice.

    What earlier versions wrote before the step of a start was known takes nothing from it.
    """
    write_start(tmp_path, range(1, 21), suffix=".1", loss=lambda step: 100.0 if step > 15 else 6.0)
    write_start(tmp_path, range(16, 31), suffix=".2", began=9000.0, loss=lambda step: 3.0)
    events = read_events(tmp_path)
    assert [began for began, _ in events.starts] == [1000.0, 9000.0]
    assert "facts/plan" not in events.args
    losses = events.points("lm loss")
    assert [point.step for point in losses] == list(range(1, 31))
    assert max(point.value for point in losses) == 6.0
    first, last = 30 + 15 * STEP_SECONDS, 30 + 15 * STEP_SECONDS
    assert [events.seconds_at(losses[index]) for index in (14, 29)] == pytest.approx(
        [first, first + last]
    )


def test_missing_runs_and_logs_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no run at .*nowhere"):
        loaded(tmp_path / "nowhere")
    SummaryWriter(log_dir=str(tmp_path / "tensorboard")).close()
    with pytest.raises(UserError, match="holds no 'lm loss'"):
        loaded(tmp_path)


def test_the_command_prints_one_page_and_writes_json(run_dir, tmp_path, capsys):
    assert cli.main(["summary", str(run_dir), "--json", str(tmp_path / "figures.json")]) == 0
    out = capsys.readouterr().out
    for shown in (
        "5.900 -> 3.450 in 30 iterations",
        "4,096 tokens/s, 250 ms per step",
        "20% of the step",
    ):
        assert shown in out
    assert f"tensorboard --logdir {run_dir / 'tensorboard'}\n" in out
    assert "to go on" not in out
    assert json.loads((tmp_path / "figures.json").read_text())[
        "tokens_per_second"
    ] == pytest.approx(4096)
    assert cli.main(["summary", str(run_dir), "--json", str(tmp_path)]) == 2
    assert "megatron-muon: error: cannot write" in capsys.readouterr().err
    (run_dir / "summary.json").write_text('{"go_on": "megatron-muon train --resume --out run"}')
    assert rows(loaded(run_dir))[-1] == (
        "to go on",
        f"megatron-muon train --resume --out {run_dir}",
    )
