"""The command line a user types, through torchrun, on real gloo ranks.

Each run costs 10 to 20 seconds of imports, so each shows several things at once.
"""

import math
import os
import re
import sys

import pytest

from megatron_muon import cli as command
from megatron_muon.errors import ExitStatus
from megatron_muon.tools.train.records import read_events
from tests.support import cli

SHARDED = cli.words(
    "--optimizer muon --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
)
SWIGLU = "--swiglu --normalization RMSNorm --disable-bias-linear"
SIX_STEPS = cli.words("--global-batch-size 4 --train-iters 6")


def assert_learns(run: cli.Run, steps: int) -> None:
    assert [iteration.number for iteration in run.iterations] == list(range(1, steps + 1))
    for iteration in run.iterations:
        assert math.isfinite(iteration.loss)
        assert math.isfinite(iteration.grad_norm)
        assert iteration.grad_norm > 0
        assert iteration.skipped == 0
    assert run.losses == sorted(run.losses, reverse=True)
    assert run.losses[0] == pytest.approx(math.log(257), abs=0.2)  # 257 ids, all as likely at first
    assert run.losses[-1] < run.losses[0] - 0.5


def table(run: cli.Run) -> dict[str, tuple[int, int, float]]:
    """Tensors, parameters and share by optimizer, from the table that is to be printed once."""
    assert run.output.count("optimizer     tensors      parameters    share") == 1
    lines = run.output.split("optimizer     tensors      parameters    share\n", 1)[1].splitlines()
    rows = {}
    for line in lines:
        fields = line.replace(",", "").split()
        if len(fields) != 4 or not fields[3].endswith("%"):
            break
        rows[fields[0]] = (
            int(fields[1]),
            int(fields[2]),
            float(fields[3][:-1]),
        )
    return rows


def notes(run: cli.Run, beginning: str) -> list[str]:
    """What the program tells the user about its settings."""
    lines = (line for line in run.output.splitlines() if line.startswith("megatron-muon: "))
    return [
        line
        for line in lines
        if line.removeprefix("megatron-muon: ").removeprefix("note: ").startswith(beginning)
    ]


def test_the_bare_line(tmp_path, capsys):
    """From an empty folder: it prepares the text, trains the quickstart model, saves; `compare`
    reads the run, and a second start is refused.
    """
    short = "--train-iters 3 --eval-interval 3 --eval-iters 1 --log-interval 1 --seq-length 64"
    flags = (*cli.MUON, *short.split())
    run = cli.torchrun(tmp_path, *flags, cold=True).checked()
    assert len(run.losses) == 3
    assert run.losses[-1] < run.losses[0]
    assert len(run.validation_losses) >= 1

    assert notes(run, "no model flags and no --config: taking configs/quickstart.yaml, writing to")
    assert notes(run, "configs/quickstart.yaml is not in this folder: taking the package's own")
    (defaults,) = notes(run, "defaults filled in: ")
    for flag in ("--ckpt-format fsdp_dtensor", "--use-distributed-optimizer"):
        assert flag in defaults
    for chosen in ("--optimizer", "--use-megatron-fsdp", "--num-layers", "--train-iters"):
        assert f"{chosen} " not in defaults
    rows = table(run)
    assert list(rows) == ["muon", "adam"]
    # 4 layers of hidden size 256, 2 key-value heads of 4: qkv 512, proj 256, gate and up 1536 rows;
    # down 768 columns.
    assert rows["muon"] == (
        16,
        4 * 256 * (512 + 256 + 1536 + 768),
        pytest.approx(95.7),
    )
    assert rows["muon"][2] + rows["adam"][2] == pytest.approx(100, abs=0.11)

    folder = tmp_path / "runs/pretrain_gpt"
    assert (folder / "checkpoints/iter_0000003").is_dir()
    scalars = read_events(folder / "tensorboard").scalars
    assert {"lm loss", "grad-norm", "learning-rate", "iteration-time"} <= set(scalars)
    assert command.main(["compare", str(folder)]) == ExitStatus.OK
    assert f"{run.validation_losses[0]:.4f}" in capsys.readouterr().out
    again = cli.torchrun(tmp_path, *flags)
    assert again.returncode != 0
    refusal = "error: runs/pretrain_gpt/checkpoints holds a run; give another --save DIR and"
    assert refusal in again.output


CONFIG = """\
ENV_VARS:
  A_VARIABLE_OF_THE_RUN: 7
MODEL_ARGS:
  --optimizer: adam
  --use-megatron-fsdp: true
  --group-query-attention: true
  --num-query-groups: 3
  --lr-warmup-iters: 3
  --untie-embeddings-and-output-weights: true
  --train-iters: 1000
"""
OVERRIDES = cli.words(f"""
    --num-attention-heads 6 --kv-channels 7 --optimizer muon --train-iters 6
    --unset untie-embeddings-and-output-weights --unset --lr-warmup-iters
    --data-parallel-sharding-strategy=optim_grads_params {SWIGLU} --bf16 --global-batch-size 12
    --clip-grad 0.5 --overlap-grad-reduce --overlap-param-gather --eval-iters 1 --eval-interval 3
    --muon-log-params
""")


@pytest.mark.wide
def test_a_config_file_with_overriding_flags(tmp_path, corpus):
    """Flags override the file, --unset takes one back; and together, on 3 ranks, what runs are made
    of: bf16, micro-batches, clipping, both overlaps, evaluation, tied embeddings, grouped queries.
    """
    (tmp_path / "experiment.yaml").write_text(CONFIG)
    flags = ("--config", "experiment.yaml", *cli.TINY, *corpus, *OVERRIDES)
    run = cli.torchrun(tmp_path, *flags, ranks=3, cold=True).checked()
    assert_learns(run, 6)
    assert {iteration.learning_rate for iteration in run.iterations} == {0.01}
    assert run.validation_losses[-1] < run.validation_losses[0]
    assert len(notes(run, "environment from experiment.yaml: A_VARIABLE_OF_THE_RUN=7")) == 1
    assert not notes(run, "no model flags")
    assert "using torch.bfloat16 for parameters" in run.output
    listed = {}
    for line in run.output.splitlines():
        if line.startswith(("muon  ", "adam  ")) and "%" not in line:
            listed[next(word for word in line.split() if "." in word)] = line
    assert table(run)["muon"][0] == 3 * 4
    assert "output_layer.weight" not in listed  # tied
    assert listed["embedding.word_embeddings.weight"].startswith("adam")
    qkv = listed["decoder.layers.2.self_attention.linear_qkv.weight"]
    assert re.match(rf"muon .* {7 * (6 + 2 * 3)} x 39 ", qkv)
    assert "204 x 39" in listed["decoder.layers.0.mlp.linear_fc1.weight"]  # gate and up


def test_one_process_needs_no_torchrun(tmp_path, corpus):
    """It ended in `environment variable MASTER_ADDR expected`, after 890 lines."""
    torchruns = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert not torchruns & os.environ.keys()
    module = (sys.executable, "-m", "megatron_muon.pretrain_gpt")
    command = [*module, *SHARDED, *cli.TINY, *corpus, *SIX_STEPS]
    run = cli.run(command, tmp_path).checked()
    assert_learns(run, 6)
    assert notes(run, "one process; for more: torchrun --nproc-per-node N")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--optimizer muon", "Setting up emerging optimizer with config OptimizerConfig("),
        ("--optimizer adam --use-megatron-fsdp", "Setting up optimizer with config OptimizerCon"),
    ],
)
def test_other_optimizers_are_upstreams(tmp_path, corpus, flags, said):
    run = cli.torchrun(
        tmp_path, *cli.TINY, *corpus, *SIX_STEPS, *flags.split(), "--logging-level", "20"
    ).checked()
    assert_learns(run, 6)
    assert said in run.output
    assert "MuonOptimizerConfig" not in run.output
    assert "optimizer     tensors" not in run.output
    (defaults,) = notes(run, "defaults filled in: ")
    assert ("fsdp_dtensor" in defaults) == ("--use-megatron-fsdp" in flags)


@pytest.mark.wide
def test_tensor_parallel_ranks(tmp_path, corpus):
    """Two by two ranks: data parallel over tensor parallel halves, each half orthogonalised by
    itself.
    """
    sizes = cli.words("--hidden-size 44 --ffn-hidden-size 102 --num-attention-heads 4")
    tp = cli.words("--tensor-model-parallel-size 2 --muon-tp-mode blockwise")
    run = cli.torchrun(
        tmp_path, *cli.TINY, *corpus, *SIX_STEPS, *SHARDED, *sizes, *tp, ranks=4
    ).checked()
    assert_learns(run, 6)
    assert table(run)["muon"] == (
        12,
        3 * 44 * (132 + 44 + 102 + 102),
        pytest.approx(80, abs=10),
    )


INSTANCES = "--num-distributed-optimizer-instances 2"
EXPERTS = f"{SWIGLU} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
BATCHES = cli.words(
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --muon-fp32-matmul-prec highest"
)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "flags", "of_four"),
    [
        (1, "--data-parallel-sharding-strategy optim", INSTANCES),
        (1, "", INSTANCES),
        (2, EXPERTS, ""),
    ],
    ids=["HSDP of ZeRO-1", "HSDP of ZeRO-3", "experts"],
)
def test_four_ranks_train_like_fewer(tmp_path, corpus, ranks, flags, of_four):
    """HSDP without overlap flags, where 0.19 by itself never reduces gradients over the instances.

    And two ranks that share each half of the experts: reduced over the wrong group, gradients would
    change their norm. On two ranks each half belongs to one alone. Upstream then averaged its
    gradients once for each micro-batch.
    """
    args = (*cli.TINY, *corpus, *SHARDED, *BATCHES, *flags.split())
    few = cli.torchrun(tmp_path, *args, ranks=ranks).checked()
    four = cli.torchrun(tmp_path, *args, *of_four.split(), ranks=4).checked()
    assert four.losses == pytest.approx(few.losses, abs=1e-4)
    norms = [[iteration.grad_norm for iteration in run.iterations] for run in (few, four)]
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)
