"""What a user can get wrong: one line that names the value and the remedy, status 2, before any
training.

Most cases call the entry point's `main` in one process that stands for the first rank of two,
because importing megatron-core for each of them would take minutes. The last tests go through
torchrun.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.functional.test_train import write_config
from tests.support import cli

pytestmark = pytest.mark.timeout(300)

ONE_PROCESS = """
import contextlib, io, json, os, sys, traceback
from pathlib import Path
from megatron_muon.megatron.launch import main

given, got = map(Path, sys.argv[1:])  # a run replaces sys.argv
environ, results = dict(os.environ), {}
for name, argv in json.loads(given.read_text()).items():
    os.environ.clear()
    os.environ.update(environ)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except BaseException:
            status, _ = "exception", traceback.print_exc()
    results[name] = [status, out.getvalue(), err.getvalue()]
got.write_text(json.dumps(results))
"""

MODEL = cli.words(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --train-iters 2 --lr 0.01"
    " --tokenizer-type NullTokenizer --vocab-size 256 --eval-iters 0"
)
RUN = (*cli.MUON, *MODEL, "--mock-data")

FILES = {
    "flag.yaml": "MODEL_ARGS:\n  --num-layers: 2\n  --hidden-sise: 32\n",
    "a-file": "not a directory\n",
    "evil/latest_checkpointed_iteration.txt": "1",
    "evil/iter_0000001/.metadata": "cposix\nmkdir\n(S'made-by-the-pickle'\ntR.",
}

# flags, by default after RUN: what the message holds; rules and slips in files are in
# tests/unit/test_refusals.py, test_path_checks.py and test_config_file.py
CASES: dict[str, tuple[str, ...]] = {}
# first: once the CPU stands in for CUDA in a process, there is a CUDA to be had
if not torch.cuda.is_available():
    CASES["--device cuda"] = ("--device cuda", "use --device cpu")
CASES |= {
    "--optimiser muon": ("--optimiser", "did you mean --optimizer?"),
    "--device abacus": ("--device", "'abacus'", "cpu"),
    "--config": ("--config", "argument"),
    "--config flag.yaml": ("flag.yaml", "did you mean --hidden-size?"),
    "--config loop.yaml": ("loop.yaml", "Too many levels of symbolic links"),
    "--tensor-model-parallel-size 4": ("world size (2) is not",),
    "--save a-file/below --save-interval 2": ("Not a directory",),
    # Story: each was a traceback, or a training that never ended well.
    f"--save {'x' * 300} --save-interval 1": ("File name too long",),
    "--eval-interval 0": ("--eval-interval 0", "--eval-iters 0"),
    # Refusals of megatron-core itself; tests/unit/test_validation.py has more of them.
    "--ckpt-format torch_dist": ("megatron-core refuses", "fsdp_dtensor"),
    "--hidden-size 33": ("refuses", "args.hidden_size % args.num_attention_heads"),
}
# Story: validation took the arguments from the checkpoint before pickles were kept from running.
for flag in ("--load", "--pretrained-checkpoint"):
    words = ("cannot be loaded", "names posix.mkdir", "it was not run")
    CASES[f"{flag} evil --use-checkpoint-args"] = words


def in_one_process(
    directory: Path,
    cases: Iterable[str],
) -> dict[str, tuple[int | str, str, str]]:
    """The exit status, stdout and stderr of each case, as the first rank of two."""
    for name, text in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (directory / "loop.yaml").symlink_to("loop.yaml")
    given, got = directory / "cases.json", directory / "results.json"
    given.write_text(
        json.dumps({flags: [*RUN, *flags.split()] for flags in cases}),
    )
    env = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # nothing gets as far as to connect
    command = [sys.executable, "-c", ONE_PROCESS, str(given), str(got)]
    cli.run(command, directory, env=env).checked()
    assert not (directory / "made-by-the-pickle").exists()
    return {name: tuple(result) for name, result in json.loads(got.read_text()).items()}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return in_one_process(tmp_path_factory.mktemp("errors"), CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_with_value_and_remedy(answers, name):
    status, _, error = answers[name]
    assert status == 2, error
    lines = [line for line in error.splitlines() if line.startswith("pretrain_gpt.py: error:")]
    assert len(lines) == 1, error
    for fragment in CASES[name]:
        assert fragment in lines[0]
    assert "Traceback" not in error


UNKNOWN_FLAG = ("--num-layres", "2"), ("unknown flag --num-layres", "did you mean --num-layers?")


@pytest.mark.parametrize(
    ("argv", "fragments", "cold"),
    [
        pytest.param(*UNKNOWN_FLAG, False, id="flag", marks=pytest.mark.wide),
        pytest.param(*UNKNOWN_FLAG, True, id="flag, from a cold start", marks=pytest.mark.wide),
        pytest.param(
            # Known only when the groups are built, and so reported from within the training loop's
            # set-up.
            ("--muon-exclude", "linear_pro."),
            (
                "--muon-exclude linear_pro. matches none of Muon's 8 matrices",
                "did you mean linear_proj?",
            ),
            False,
            id="pattern",
        ),
    ],
)
def test_torchrun_shows_a_mistake_once(tmp_path, argv, fragments, cold):
    """Rank 1 ends silently; torchrun, which then ends rank 0, must not do so before rank 0 has
    spoken.
    """
    run = cli.torchrun(tmp_path, *RUN, "--eval-interval", "10", *argv, cold=cold)
    assert run.returncode != 0
    lines = [line for line in run.output.splitlines() if "pretrain_gpt.py: error:" in line]
    assert len(lines) == 1, run.tail
    for fragment in fragments:
        assert fragment in lines[0]
    assert "megatron_muon/" not in run.output, "a traceback of ours"
    assert not run.iterations


def test_dry_run_start_and_torchrun_say_the_same(tmp_path):
    """Each mistake in a line; some ended in 1,200 lines after the model was built."""
    mistakes = ("--async-save", "--fp16")
    write_config(tmp_path / "run.yaml", *RUN, "--global-batch-size", "8")
    line = "-m megatron_muon.cli train --config run.yaml --nproc 2 --out run"
    train = [sys.executable, *line.split()]
    runs = [
        cli.run([*train, "--dry-run", "--", *mistakes], tmp_path),
        cli.run([*train, "--", *mistakes], tmp_path),
        cli.torchrun(tmp_path, "--config", "run.yaml", *mistakes),
    ]
    said = [re.findall(r"error: (.*)", run.output) for run in runs]
    assert len(said[0]) == 2, runs[0].tail
    assert "--async-save does not work on the CPU" in said[0][0]
    assert "--fp16 is not supported" in said[0][1]
    assert said[1] == said[0]
    assert said[2][:2] == said[0], runs[2].tail
    assert [run.returncode for run in runs[:2]] == [2, 2]
    assert not (tmp_path / "run").exists()
