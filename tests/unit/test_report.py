"""`megatron-muon report`: arms, the steps to a loss, and the page, from runs as a training leaves
them.
"""

import math

import pytest

from megatron_muon import cli
from megatron_muon.errors import UserError
from megatron_muon.tools.report.arms import (
    Spread,
    best_arms,
    compare,
    find_runs,
    not_comparable,
    reach,
    read_arms,
)
from tests.support.made_runs import falling, make_run, report_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """AdamW and Muon at two rates each with two seeds; at the higher rate one run of Muon diverged."""
    root = tmp_path_factory.mktemp("runs")
    for optimizer, rates in (
        ("adam", {"1e-3": 0.02, "2e-3": 0.03}),
        ("muon", {"4e-3": 0.06, "8e-3": 0.05}),
    ):
        for lr, speed in rates.items():
            for seed in (1, 2):
                loss = falling(speed + seed / 1000)
                if (lr, seed) == ("8e-3", 2):
                    loss = lambda step: 6.0 if step < 20 else math.nan  # noqa: E731
                make_run(
                    root / f"{optimizer}-{lr}" / f"seed={seed}",
                    loss,
                    optimizer=optimizer,
                    lr=lr,
                    seed=seed,
                )
    return root


def test_arms_are_runs_that_differ_in_their_seed(runs):
    arms, empty = read_arms(find_runs([runs]))
    assert [arm.name for arm in arms] == [
        "optimizer=adam,lr=1e-3",
        "optimizer=adam,lr=2e-3",
        "optimizer=muon,lr=4e-3",
        "optimizer=muon,lr=8e-3",
    ]
    assert [[run.seed for run in arm.runs] for arm in arms] == [[1, 2]] * 4
    assert [arm.diverged for arm in arms] == [0, 0, 0, 1]
    assert not empty
    assert [arm.name for arm in best_arms(arms)] == [
        "optimizer=adam,lr=2e-3",
        "optimizer=muon,lr=4e-3",
    ]


def test_a_runs_name_elsewhere_is_no_setting(tmp_path):
    """Weights & Biases calls each seed otherwise. Without a launcher's summary the events say how a
    run ended.
    """
    for seed in (1, 2):
        args = {"wandb_exp_name": f"lr=0.01/seed={seed}", "wandb_save_dir": f"runs/seed={seed}"}
        folder = make_run(
            tmp_path / f"seed={seed}", falling(0.1), seed=seed, args=args, summary=False
        )
        (folder / "config.yaml").unlink()  # torchrun's
    (arm,), _ = read_arms([tmp_path / "seed=1", tmp_path / "seed=2"])
    assert [(run.outcome, run.iterations, run.diverged) for run in arm.runs] == [
        ("finished", 40, False)
    ] * 2


def test_steps_to_a_loss(runs):
    """The last validation of AdamW is at step 40; Muon comes to that loss between two of its own."""
    arms, _ = read_arms(find_runs([runs]))
    (one,) = compare(best_arms(arms))
    means = {
        step: sum(falling(0.06 + seed / 1000)(step) + 0.1 for seed in (1, 2)) / 2
        for step in (10, 20, 30)
    }
    target = sum(falling(0.03 + seed / 1000)(40) + 0.1 for seed in (1, 2)) / 2
    assert one.target == pytest.approx(target)
    assert means[20] > target > means[30] or means[10] > target > means[20]
    before = 20 if means[20] > target else 10
    expected = before + 10 * (means[before] - target) / (means[before] - means[before + 10])
    assert one.reached.steps == pytest.approx(expected, rel=1e-5)
    assert one.steps_ratio == pytest.approx(expected / 40, rel=1e-5)
    # both take as long for a step
    assert one.seconds_ratio == pytest.approx(one.steps_ratio, rel=1e-5)
    slower, faster = sorted((crossing.steps for crossing in one.by_seed), reverse=True)
    assert faster < expected < slower
    assert reach(one.arm.curve("validation"), 1.0) is None
    # at the first validation: no line to take it from
    assert reach(one.arm.curve("validation"), 5.9).steps == 10


def test_the_page(runs, tmp_path, capsys):
    out = tmp_path / "report"
    assert cli.main(["report", str(runs), "--out", str(out)]) == 0
    assert "8 runs of 4 settings" in capsys.readouterr().out
    text = (out / "report.md").read_text()
    (one,) = compare(best_arms(read_arms(find_runs([runs]))[0]))
    for part in (
        f"in {one.steps_ratio:.2f} of the steps**: {one.reached.steps:,.0f} instead of 40",
        "| learning rate | 0.002 | 0.004 |",
        "| seeds | 1, 2 | 1, 2 |",
        "| bytes of optimizer state, all ranks | 6,500,000 | 6,500,000 |",
        "diverged: 1 of 2",
        "8 runs: commit abc; python 3.12.1; P, 2 cores",
        "](loss-steps.png)",
        "](final-loss-by-rate.png)",
    ):
        assert part in text
    assert {path.name for path in out.glob("*.png")} == {"loss-steps.png", "final-loss-by-rate.png"}


# What may be concluded

NOT_COMPARED = "**These runs are not compared: they were not trained on the same.**"
OTHER_STEPS = "**Muon and AdamW are not compared: their steps are not of the same size.**"
RISING = {"loss": lambda step: 3.0 + abs(step - 30) / 10}
"""Its last step is not where it first came to its last loss."""


def of_both(key, adam, muon):
    return {"args": {key: adam}}, {"args": {key: muon}}


@pytest.mark.parametrize(
    ("adam", "muon", "says", "lacks"),
    [
        (
            {"loss": falling(0.1)},
            {"loss": falling(0.01)},
            ["**Muon did not reach AdamW's final validation loss of"],
            ["| of its steps |"],
        ),
        (
            {"loss": falling(0.02), "steps": 10},
            {"loss": falling(0.2), "steps": 20},
            ["by its first validation, too late to conclude anything: validate more often.**"],
            ["of the steps**"],
        ),
        (RISING, {"loss": falling(0.05)}, ["| steps to the baseline's final loss | 20 |"], []),
        ({}, {}, ["of the steps**", "of the time", "| of its time |"], []),
        ({}, {"run": {"ranks": 4}}, ["of the steps**"], ["of the time", "of its time"]),
        *(
            (
                *of_both(key, adam, muon),
                [NOT_COMPARED, f"|  | {key} |", f"| `{adam}` |", f"| `{muon}` |"],
                ["of the steps**", "Side by side", "| best |"],
            )
            for key, adam, muon in (
                ("data_path", "['/data/stdlib']", "['/data/mine']"),
                ("split", "98,2,0", "90,10,0"),
                ("seq_length", "64", "128"),
            )
        ),
        *(
            (
                *of_both(key, adam, muon),
                [OTHER_STEPS, "Side by side"],
                ["of the steps**", "steps to the baseline"],
            )
            for key, adam, muon in (("global_batch_size", "8", "16"), ("num_layers", "4", "8"))
        ),
    ],
)
def test_what_is_concluded(tmp_path, adam, muon, says, lacks):
    make_run(tmp_path / "adam", **{"loss": falling(0.05), "optimizer": "adam", **adam})
    make_run(tmp_path / "muon", **{"loss": falling(0.1), **muon})
    text = report_of(tmp_path).page(())
    assert [part for part in says if part not in text] == []
    assert [part for part in lacks if part in text] == []


def test_a_relative_path_is_other_data_in_another_folder(tmp_path):
    for optimizer, path in (
        ("adam", "['0.5', 'data/a']"),
        ("muon", "['0.5', 'data/a']"),
        ("lion", "['/d']"),
    ):
        args, run = {"data_path": path}, {"directory": f"/home/{optimizer}"}
        make_run(tmp_path / optimizer, falling(0.05), optimizer=optimizer, args=args, run=run)
    adam, lion, muon = read_arms(find_runs([tmp_path]))[0]
    assert not_comparable([adam, muon])["data_path"][0] == "['0.5', 'data/a'] from /home/adam"
    assert not_comparable([adam, lion])["data_path"][1] == "['/d']"


def test_a_rate_that_was_not_searched_is_told(tmp_path):
    for lr in ("1e-3", "2e-3", "4e-3"):
        make_run(
            tmp_path / f"adam-{lr}",
            falling(0.03 if lr == "2e-3" else 0.02),
            optimizer="adam",
            lr=lr,
        )
    make_run(tmp_path / "muon-8e-3", falling(0.05), lr="8e-3")
    assert "- Muon has one learning rate here; others may do better." in report_of(tmp_path).page(
        ()
    )
    make_run(tmp_path / "muon-4e-3", falling(0.04), lr="4e-3")
    text = report_of(tmp_path).page(())
    assert "lr=8e-3 is the most that was tried; a larger one may do better." in text
    assert text.count("may do better") == 1


def test_a_first_validation_is_a_bound(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / f"adam-{seed}", falling(0.02), optimizer="adam", seed=seed)
        make_run(tmp_path / f"muon-{seed}", falling(0.2), seed=seed)
    text = report_of(tmp_path).page(())
    for part in (
        (
            "in at most 0.25 of the steps**: at or before step 10 instead of 40, in at most 0.25 of"
            " the time"
        ),
        "Each seed by itself: at most 0.25 to 0.25 of the steps",
        "| 40 | at or before 10 |",
        "| at most 0.250 |",
    ):
        assert part in text


def test_a_run_without_validation_missed_no_loss(tmp_path):
    for optimizer in ("adam", "muon", "lion"):
        make_run(
            tmp_path / optimizer, falling(0.1), optimizer=optimizer, validation=optimizer != "lion"
        )
    report = report_of(tmp_path)
    assert "Lion did not reach" not in report.page(())
    (lion,) = [arm for arm in report.arms if arm.optimizer == "lion"]
    assert lion.final is None, "a training loss is not a validation loss"
    assert lion not in report.best


def test_a_spread_leaves_out_non_finite_values():
    assert Spread.of([1.0, None, math.nan, 3.0]) == Spread(2.0, math.sqrt(2), 1.0, 3.0, 2)
    assert f"{Spread.of([2.0]):.1f}" == "2.0"
    assert Spread.of([None]) is None


def test_no_runs_are_a_users_error(tmp_path):
    with pytest.raises(UserError, match=r"no run at or below"):
        find_runs([tmp_path])
