"""`megatron-muon report`: arms, the steps to a loss, and the page, from runs as a training leaves them."""

import math

import pytest

from megatron_muon import cli
from megatron_muon.errors import UserError
from megatron_muon.tools.report.arms import Spread, find_runs, read_arms
from megatron_muon.tools.report.comparison import best_arms, compare, not_comparable, reach
from megatron_muon.tools.report.page import Report
from megatron_muon.tools.train.records import read_record
from tests.support.made_runs import falling, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """AdamW and Muon at two rates each with two seeds; at the higher rate one run of Muon diverged."""
    root = tmp_path_factory.mktemp("runs")
    for optimizer, rates in (("adam", {"1e-3": 0.02, "2e-3": 0.03}), ("muon", {"4e-3": 0.06, "8e-3": 0.05})):
        for lr, speed in rates.items():
            for seed in (1, 2):
                loss = falling(speed + seed / 1000)
                if (lr, seed) == ("8e-3", 2):
                    loss = lambda step: 6.0 if step < 20 else math.nan  # noqa: E731
                make_run(root / f"{optimizer}-{lr}" / f"seed={seed}", loss, optimizer=optimizer, lr=lr, seed=seed)
    return root


def test_arms_are_runs_that_differ_in_their_seed(runs):
    arms, empty = read_arms(find_runs([runs]))
    assert [arm.name for arm in arms] == [
        "optimizer=adam,lr=1e-3", "optimizer=adam,lr=2e-3", "optimizer=muon,lr=4e-3", "optimizer=muon,lr=8e-3",
    ]  # fmt: skip
    assert [[run.seed for run in arm.runs] for arm in arms] == [[1, 2]] * 4
    assert [arm.diverged for arm in arms] == [0, 0, 0, 1]
    assert not empty
    assert [arm.name for arm in best_arms(arms)] == ["optimizer=adam,lr=2e-3", "optimizer=muon,lr=4e-3"]


def test_a_runs_name_elsewhere_is_no_setting(tmp_path):
    """Weights & Biases calls each seed otherwise."""
    for seed in (1, 2):
        args = {"wandb_exp_name": f"lr=0.01/seed={seed}", "wandb_save_dir": f"runs/seed={seed}"}
        folder = make_run(tmp_path / f"seed={seed}", falling(0.1), seed=seed, args=args)
        (folder / "config.yaml").unlink()  # torchrun's
    arms, _ = read_arms([tmp_path / "seed=1", tmp_path / "seed=2"])
    assert len(arms) == 1


def test_steps_to_a_loss(runs):
    """The last validation of AdamW is at step 40; Muon comes to that loss between two of its own."""
    arms, _ = read_arms(find_runs([runs]))
    (one,) = compare(best_arms(arms))
    means = {step: sum(falling(0.06 + seed / 1000)(step) + 0.1 for seed in (1, 2)) / 2 for step in (10, 20, 30)}
    target = sum(falling(0.03 + seed / 1000)(40) + 0.1 for seed in (1, 2)) / 2
    assert one.target == pytest.approx(target)
    assert means[20] > target > means[30] or means[10] > target > means[20]
    before = 20 if means[20] > target else 10
    expected = before + 10 * (means[before] - target) / (means[before] - means[before + 10])
    assert one.reached.steps == pytest.approx(expected, rel=1e-5)
    assert one.steps_ratio == pytest.approx(expected / 40, rel=1e-5)
    assert one.seconds_ratio == pytest.approx(one.steps_ratio, rel=1e-5)  # both take as long for a step
    slower, faster = sorted((crossing.steps for crossing in one.by_seed), reverse=True)
    assert faster < expected < slower
    assert reach(one.arm.curve("validation"), 1.0) is None
    assert reach(one.arm.curve("validation"), 5.9).steps == 10  # at the first validation: no line to take it from


def test_seconds_are_summed_over_starts(tmp_path):
    """A run that was stopped for an hour has not trained in that hour; a step that was trained again counts once."""
    from torch.utils.tensorboard import SummaryWriter

    for began, steps, suffix in ((1000.0, (1, 2, 3, 4), ".a"), (5000.0, (3, 4, 5), ".b")):
        with SummaryWriter(log_dir=str(tmp_path / "tensorboard"), filename_suffix=suffix) as writer:
            for name, value in {"seq_length": 64, "optimizer": "muon"}.items():
                writer.add_text(name, str(value), global_step=steps[0] - 1, walltime=began)
            for at, step in enumerate(steps, start=1):
                writer.add_scalar("lm loss", 5.0, step, walltime=began + at)
                writer.add_scalar("lm loss vs samples", 5.0, step * 8, walltime=began + at)
    record = read_record(tmp_path)
    assert [(point.step, point.seconds) for point in record.train] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    assert [point.tokens for point in record.train] == [step * 8 * 64 for step in (1, 2, 3, 4, 5)]
    assert record.train_seconds == 5


def test_a_run_without_a_summary_has_what_its_events_say(tmp_path):
    make_run(tmp_path / "task-1", falling(0.1), summary=False)
    record = read_record(tmp_path / "task-1")
    assert (record.outcome, record.iterations, record.diverged) == ("finished", 40, False)


def test_the_page(runs, tmp_path, capsys):
    out = tmp_path / "report"
    assert cli.main(["report", str(runs), "--out", str(out)]) == 0
    assert "8 runs of 4 settings" in capsys.readouterr().out
    text = (out / "report.md").read_text()
    (one,) = compare(best_arms(read_arms(find_runs([runs]))[0]))
    assert f"in {one.steps_ratio:.2f} of the steps**: {one.reached.steps:,.0f} instead of 40" in text
    assert "| learning rate | 0.002 | 0.004 |" in text
    assert "| seeds | 1, 2 | 1, 2 |" in text
    assert "| bytes of optimizer state, all ranks | 6,500,000 | 6,500,000 |" in text
    assert "diverged: 1 of 2" in text
    assert "8 runs: commit abc; python 3.12.1; P, 2 cores" in text
    assert {path.name for path in out.glob("*.png")} == {"loss-steps.png", "final-loss-by-rate.png"}
    assert "](loss-steps.png)" in text
    assert "](final-loss-by-rate.png)" in text


def test_a_single_run_has_a_page_of_its_own(tmp_path):
    make_run(tmp_path / "one", falling(0.1), validation=False)
    assert cli.main(["report", str(tmp_path / "one"), "--out", str(tmp_path / "page")]) == 0
    text = (tmp_path / "page" / "report.md").read_text()
    assert text.startswith("# Muon\n")
    assert "Side by side" not in text
    assert [path.name for path in (tmp_path / "page").glob("*.png")] == ["loss-steps.png"]


def test_not_reached_is_said(tmp_path):
    make_run(tmp_path / "runs" / "adam", falling(0.1), optimizer="adam")
    make_run(tmp_path / "runs" / "muon", falling(0.01))
    text, _ = page_of(tmp_path)
    assert "**Muon did not reach AdamW's final validation loss of" in text
    assert "| of its steps |" not in text


# What may be concluded


def page_of(tmp_path):
    """The page, without pictures, and the report of the runs below `tmp_path / "runs"`."""
    report = Report(*read_arms(find_runs([tmp_path / "runs"])))
    return report.page(()), report


@pytest.mark.parametrize(
    ("key", "adam", "muon"),
    [("data_path", "['/data/stdlib']", "['/data/mine']"), ("split", "98,2,0", "90,10,0"), ("seq_length", "64", "128")],
)
def test_runs_that_were_not_trained_on_the_same_are_not_compared(tmp_path, key, adam, muon):
    make_run(tmp_path / "runs" / "adam", falling(0.05), optimizer="adam", args={key: adam})
    make_run(tmp_path / "runs" / "muon", falling(0.1), args={key: muon})
    text, report = page_of(tmp_path)
    assert "**These runs are not compared: they were not trained on the same.**" in text
    assert f"|  | {key} |" in text
    assert f"| `{muon}` |" in text
    for conclusion in ("of the steps**", "Side by side", "| best |"):
        assert conclusion not in text
    assert (report.best, report.compared) == ([], [])
    assert not_comparable(report.arms) == {key: [adam, muon]}


def test_a_relative_path_is_other_data_in_another_folder(tmp_path):
    for optimizer, path in (("adam", "['0.5', 'data/a']"), ("muon", "['0.5', 'data/a']"), ("lion", "['/d']")):
        args, run = {"data_path": path}, {"directory": f"/home/{optimizer}"}
        make_run(tmp_path / "runs" / optimizer, falling(0.05), optimizer=optimizer, args=args, run=run)
    adam, lion, muon = read_arms(find_runs([tmp_path / "runs"]))[0]
    assert not_comparable([adam, muon])["data_path"][0] == "['0.5', 'data/a'] from /home/adam"
    assert not_comparable([adam, lion])["data_path"][1] == "['/d']"


@pytest.mark.parametrize("args", [{"global_batch_size": "16"}, {"num_layers": "8"}])
def test_steps_that_cost_something_else_are_not_compared(tmp_path, args):
    for optimizer, given in (("adam", {"num_layers": "4"}), ("muon", {"num_layers": "4", **args})):
        make_run(tmp_path / "runs" / optimizer, falling(0.05), optimizer=optimizer, args=given)
    text, report = page_of(tmp_path)
    assert "**Muon and AdamW are not compared: their steps are not of the same size.**" in text
    assert "of the steps**" not in text
    assert "steps to the baseline" not in text
    assert len(report.best) == 2
    assert report.compared[0].steps_ratio is None


def test_a_rate_that_was_not_searched_is_told(tmp_path):
    for lr in ("1e-3", "2e-3", "4e-3"):
        make_run(tmp_path / "runs" / f"adam-{lr}", falling(0.03 if lr == "2e-3" else 0.02), optimizer="adam", lr=lr)
    make_run(tmp_path / "runs" / "muon-8e-3", falling(0.05), lr="8e-3")
    assert "- Muon has one learning rate here; others may do better." in page_of(tmp_path)[0]
    make_run(tmp_path / "runs" / "muon-4e-3", falling(0.04), lr="4e-3")
    text, _ = page_of(tmp_path)
    assert "lr=8e-3 is the most that was tried; a larger one may do better." in text
    assert text.count("may do better") == 1


def test_a_first_validation_is_a_bound(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"adam-{seed}", falling(0.02), optimizer="adam", seed=seed)
        make_run(tmp_path / "runs" / f"muon-{seed}", falling(0.2), seed=seed)
    text, report = page_of(tmp_path)
    assert "in at most 0.25 of the steps**: at or before step 10 instead of 40, in at most 0.25 of the time" in text
    assert "Each seed by itself: at most 0.25 to 0.25 of the steps" in text
    assert "| 40 | at or before 10 |" in text
    assert "| at most 0.250 |" in text
    assert report.compared[0].reached.is_bound


def test_a_first_validation_at_the_end_tells_nothing(tmp_path):
    make_run(tmp_path / "runs" / "adam", falling(0.02), optimizer="adam", steps=10)
    make_run(tmp_path / "runs" / "muon", falling(0.2), steps=20)
    text, _ = page_of(tmp_path)
    assert "by its first validation, too late to conclude anything: validate more often.**" in text
    assert "of the steps**" not in text


def test_a_baseline_that_was_there_before_is_told(tmp_path):
    """Its loss may rise at the end: its last step is not where it first came to its last loss."""
    make_run(tmp_path / "runs" / "adam", lambda step: 3.0 + abs(step - 30) / 10, optimizer="adam")
    make_run(tmp_path / "runs" / "muon", falling(0.05))
    assert "| steps to the baseline's final loss | 20 |" in page_of(tmp_path)[0]


@pytest.mark.parametrize(("ranks", "is_timed"), [(2, True), (4, False)])
def test_times_are_compared_on_alike_machines_alone(tmp_path, ranks, is_timed):
    make_run(tmp_path / "runs" / "adam", falling(0.05), optimizer="adam")
    make_run(tmp_path / "runs" / "muon", falling(0.1), run={"ranks": ranks})
    text, report = page_of(tmp_path)
    assert ("of the time" in text) == is_timed
    assert (report.compared[0].seconds_ratio is not None) == is_timed


def test_a_run_without_validation_missed_no_loss(tmp_path):
    make_run(tmp_path / "runs" / "adam", falling(0.05), optimizer="adam")
    make_run(tmp_path / "runs" / "muon", falling(0.1))
    make_run(tmp_path / "runs" / "lion", falling(0.2), optimizer="lion", validation=False)
    text, report = page_of(tmp_path)
    assert "Lion did not reach" not in text
    (lion,) = [arm for arm in report.arms if arm.optimizer == "lion"]
    assert lion.final is None, "a training loss is not a validation loss"
    assert lion not in report.best


def test_a_dollar_sign_is_drawn_as_one(tmp_path):
    """Matplotlib takes what stands between two for mathematics, and fails where it is none."""
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, falling(0.1), flags={"--data-path": f"'$$\\{name}rac$$'"})
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page")]) == 0
    assert "data_path=$\\arac$" in (tmp_path / "page" / "report.md").read_text("utf-8")


def test_a_spread_leaves_out_non_finite_values():
    assert Spread.of([1.0, None, math.nan, 3.0]) == Spread(2.0, math.sqrt(2), 1.0, 3.0, 2)
    assert f"{Spread.of([2.0]):.1f}" == "2.0"
    assert Spread.of([None]) is None


def test_no_runs_are_a_users_error(tmp_path):
    with pytest.raises(UserError, match=r"no run at or below"):
        find_runs([tmp_path])
