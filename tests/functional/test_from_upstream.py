"""Runs of megatron-core's own Muon under DDP continue under Megatron-FSDP, and back again.

`pretrain_gpt.py --optimizer muon` without `--use-megatron-fsdp` is megatron-core's, unchanged. Its
torch_dist checkpoint is made here, by its own code. `-s` prints the losses side by side.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.checkpoint import content, folders
from megatron_muon.checkpoint.content import STEP
from megatron_muon.checkpoint.torch_dist import COMMON, read_object
from megatron_muon.tools.doctor.doctor_command import checkpoint
from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings, train
from tests.support.wide import wide_but

SIZES = cli.words(
    "--hidden-size 40 --ffn-hidden-size 96 --num-attention-heads 4 --make-vocab-size-divisible-by 2"
    " --muon-fp32-matmul-prec highest --muon-tp-mode duplicated --train-iters 6 --save-interval 2"
    " --lr-decay-style cosine --min-lr 0.001"
)
UPSTREAM = cli.words("--optimizer muon --ckpt-format torch_dist")
SWIGLU = cli.words("--swiglu --normalization RMSNorm --disable-bias-linear")
ROPE = cli.words("--position-embedding-type rope")
LATENT = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "add_bias_linear": False,
}
LATENT_SHAPES = {
    "linear_q_down_proj": (8, 40),
    "linear_q_up_proj": (48, 8),
    "linear_kv_down_proj": (12, 40),
    "linear_kv_up_proj": (64, 8),
    "linear_proj": (40, 32),
}
"""Latent attention, which megatron-core's local layers cannot compute, and its weights."""
OF_GPUS = {
    "transformer_impl": "transformer_engine",
    "no_persist_layer_norm": False,
    "masked_softmax_fusion": True,
    "apply_rope_fusion": True,
    "gradient_accumulation_fusion": True,
}
"""Arguments of a run on GPUs that the CPU's lacks."""
LEARNED = "embedding.position_embeddings.weight"
TOLERANCE = 1e-5
"""Of losses in fp32; they are printed to 1e-6."""

ROUND_TRIPS = {
    "DDP": (),
    "TP 2": (*SWIGLU, *cli.words("--tensor-model-parallel-size 2")),
    "EP 2": (
        *SWIGLU,
        *ROPE,
        *cli.words("--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"),
    ),
}
MOE = cli.words("--num-experts 4 --moe-router-topk 2")
TP_2 = cli.words("--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 1")
EP_2 = cli.words("--expert-model-parallel-size 2")
PP_2 = cli.words("--pipeline-model-parallel-size 2")
FOUR_LAYERS = cli.words("--num-layers 4")
UNTIED = cli.words("--untie-embeddings-and-output-weights")
MOVES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "TP 2 to 1": (SWIGLU, TP_2, ()),
    "TP 1 to 2": (SWIGLU, (), TP_2),
    "EP 2 to 1": ((*SWIGLU, *ROPE, *MOE), EP_2, ()),
    "EP 1 to 2": ((*SWIGLU, *ROPE, *MOE), (), EP_2),
    "PP 2": ((*SWIGLU, *FOUR_LAYERS), PP_2, ()),
    "PP 2, untied, to TP 2": ((*SWIGLU, *FOUR_LAYERS, *UNTIED), PP_2, TP_2),
    "experts, PP 2 to EP 2": ((*SWIGLU, *FOUR_LAYERS, *ROPE, *MOE), PP_2, EP_2),
}
"""Flags of the model, of megatron-core's layout, and of ours; two ranks each."""
STRATEGIES = ("optim_grads_params", "no_shard", "optim", "optim_grads")


def ours(strategy: str = "optim_grads_params") -> tuple[str, ...]:
    return (*cli.MUON, "--data-parallel-sharding-strategy", strategy)


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    """Six steps of eight sequences, saved every two."""
    return Trainings(ranks, tmp_path, (*cli.TINY, *SIZES, *corpus), batch=8)


def upstream(training: Trainings, *flags: str, ranks: int = 2) -> cli.Run:
    """A run of megatron-core's own Muon, with a variable that its tensor parallelism needs."""
    line = training.line(*UPSTREAM, *flags, ranks=ranks)
    answers = training.ranks(ranks, one_connection, argv=line, folder=str(training.folder))
    return cli.Run(answers[0][0], "".join(text for _, text in answers), 0.0)


def one_connection(rank: int, world_size: int, **kwargs: Any) -> tuple[int, str]:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return train(rank, world_size, **kwargs)


def losses(run: cli.Run) -> dict[int, float]:
    """The loss of each step.

    megatron-core 0.19 prints the mean of the first two in the place of the second.
    """
    found = run.checked().losses
    if len(found) > 1:
        found[1] = 2 * found[1] - found[0]
    numbers = [iteration.number for iteration in run.iterations]
    return dict(zip(numbers, found, strict=True))


def export(training: Trainings, name: str, iteration: int, out: str) -> cli.Run:
    folder = folders.iteration_folder(training.folder / name, iteration)
    command = [sys.executable, "-m", "megatron_muon.cli", "export"]
    command += ["--checkpoint", str(folder), "--to", "torch_dist", str(training.folder / out)]
    return cli.run(command, training.folder)


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], abs=TOLERANCE), number


@pytest.mark.parametrize("layout", wide_but(["DDP"], ROUND_TRIPS))
def test_a_round_trip_has_the_losses_of_a_run_that_stayed(training: Trainings, layout: str) -> None:
    """Steps 1 and 2 are upstream's, 3 and 4 ours, 5 and 6 upstream's again.

    Weights, momentum, moments and their counters, schedule and data position: each would change
    them. With learned positions, which upstream gives to Muon and we to Adam.
    """
    flags = ROUND_TRIPS[layout]
    stayed = losses(upstream(training, *flags, "--save", "upstream"))
    run = training(*ours(), *flags, *cli.words("--load upstream --ckpt-step 2 --save ours"))
    went = losses(run)
    assert list(went) == [3, 4, 5, 6]
    export(training, "ours", 4, "back").checked()
    for folder in ("upstream", "back"):
        states = {each.about: each.state for each in checkpoint(training.folder / folder)}
        assert states["torch_dist"] == states["written by"] == "ok"
    back = losses(upstream(training, *flags, "--load", "back"))
    assert list(back) == [5, 6]
    for number, loss in stayed.items():
        others = [f"{of.get(number, float('nan')):.6f}" for of in (went, back)]
        print(f"| {layout} | {number} | {loss:.6f} | {' | '.join(others)} |".replace("nan", ""))
    assert_same(went, stayed)
    assert_same(back, stayed)


@pytest.mark.wide
@pytest.mark.parametrize("move", MOVES)
def test_a_checkpoint_of_another_layout_continues(training: Trainings, move: str) -> None:
    """The padded vocabulary is the same; dropout is 0, as random numbers start anew."""
    model, theirs, own = MOVES[move]
    stayed = losses(upstream(training, *model, *theirs, "--save", "upstream"))
    load = cli.words("--load upstream --ckpt-step 2")
    run = training(*ours(), *model, *own, *load)
    assert list(losses(run)) == [3, 4, 5, 6]
    for number, loss in losses(run).items():
        print(f"| {move} | {number} | {stayed[number]:.6f} | {loss:.6f} |")
    assert_same(losses(run), stayed)


def without_momentum(folder: Path) -> None:
    """Take the momentum of one stack of matrices out of a checkpoint's index."""
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    (name,) = [
        name
        for name in metadata.state_dict_metadata
        if name.endswith("momentum_buffer.decoder.layers.mlp.linear_fc2.weight")
    ]
    del metadata.state_dict_metadata[name]
    metadata.storage_data = {
        key: value for key, value in metadata.storage_data.items() if key.fqn != name
    }
    index.write_bytes(pickle.dumps(metadata))


DESTINATIONS = {
    "one rank": (1, ours()),
    "no_shard": (2, ours("no_shard")),
    "optim": (2, ours("optim")),
    "optim_grads": (2, ours("optim_grads")),
    "offload": (2, (*ours(), *cli.words("--muon-offload cpu"))),
    "offload all": (2, (*ours(), *cli.words("--muon-offload cpu --muon-offload-state all"))),
}


@pytest.mark.wide
def test_every_destination_continues_and_nothing_is_lost_in_silence(training: Trainings) -> None:
    """Strategies, ranks, tensor parallelism and offload; then what is refused or warned of."""
    stayed = losses(upstream(training, *SWIGLU, "--save", "upstream"))
    load = (*SWIGLU, *cli.words("--load upstream --ckpt-step 2"))
    for name, (ranks, flags) in DESTINATIONS.items():
        run = training(*flags, *load, ranks=ranks)
        assert "warning" not in run.output.replace("UserWarning", ""), name
        assert_same(losses(run), stayed)

    run = training(*ours(), *load, "--muon-matrices", "ours").checked()
    assert "3 entries of optimizer state start at zero" in run.output
    assert f"{LEARNED} (Muon there, not here)" in run.output
    assert losses(run)[4] != pytest.approx(stayed[4], abs=100 * TOLERANCE)
    run = training(*ours(), *load, *cli.words("--muon-num-ns-steps 8")).checked()
    assert "the checkpoint's run had --muon-num-ns-steps 5; this run has 8" in run.output
    run = training(*ours(), *load, "--muon-split-heads")
    assert run.returncode == 2
    assert "--muon-split-heads does not work with --muon-matrices upstream" in run.output
    run = training(*ours(), *cli.words("--load upstream --ckpt-step 2"))
    assert run.returncode == 2
    assert "is of another model: decoder.final_layernorm.bias is not in it" in run.output
    # these were loaded in part
    run = training(*ours(), *load, *cli.words("--num-layers 2 --finetune"))
    assert run.returncode == 2
    assert "norm.weight is (3, 40) in the checkpoint and (40,) in this model" in run.output
    run = training(*ours(), *load, *ROPE)
    assert run.returncode == 2
    assert f"this one lacks 1 of its weights: {LEARNED}" in run.output
    run = training(*ours(), *load, *ROPE, "--no-strict-fsdp-dtensor-load").checked()
    assert f"that this model lacks are left out, 1: {LEARNED}" in run.output

    flags = (*SWIGLU, *cli.words("--optimizer adam --save adam"))
    upstream(training, *flags).checked()
    run = training(*ours(), *SWIGLU, *cli.words("--load adam --ckpt-step 2")).checked()
    assert "start at zero, because another optimizer or layout wrote" in run.output
    assert "mlp.linear_fc1.weight" in run.output

    # the comparison can fail: without a third of the momentum
    shutil.copytree(training.folder / "upstream", training.folder / "broken")
    without_momentum(folders.iteration_folder(training.folder / "broken", 2))
    load = (*SWIGLU, *cli.words("--load broken --ckpt-step 2"))
    run = training(*ours(), *load)
    assert run.returncode == 2
    assert "lacks 3 entries of optimizer state: decoder.layers.0.mlp.linear_fc2" in run.output
    run = training(*ours(), *load, "--muon-allow-missing-state")
    assert losses(run)[4] != pytest.approx(stayed[4], abs=100 * TOLERANCE)


MODEL_FLAGS = cli.words(
    "--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --seq-length"
    " --max-position-embeddings"
)


def without_model(training: Trainings) -> Trainings:
    """Runs without the flags that size the model."""
    flags = list(training.flags)
    for flag in MODEL_FLAGS:
        while flag in flags:
            place = flags.index(flag)
            del flags[place : place + 2]
    return replace(training, flags=tuple(flags))


def plan(training: Trainings, *flags: str) -> dict[str, Any]:
    """The figures that `megatron-muon plan` has for a run on two ranks, and `printed`."""
    (training.folder / "run.yaml").write_text("MODEL_ARGS: {}\n", "utf-8")
    command = [sys.executable, "-m", "megatron_muon.cli", "plan", "--config", "run.yaml"]
    command += cli.words("--world-size 2 --hardware cpu-2core --json plan.json")
    run = cli.run([*command, *training.line(*flags)], training.folder).checked()
    figures = json.loads((training.folder / "plan.json").read_text("utf-8"))
    return {**figures, "printed": run.output}


@pytest.mark.wide
def test_a_checkpoint_has_the_model_and_the_matrices_of_run_and_plan(training: Trainings) -> None:
    """Muon has learned positions then, which it has not in a plan without --load."""
    stayed = losses(upstream(training, *SWIGLU, "--save", "upstream"))
    own = (*ours(), *cli.words("--load upstream --ckpt-step 2"))
    bare = without_model(training)
    run = bare(*own, "--use-checkpoint-args")
    assert_same(losses(run), stayed)
    (digest,) = set(re.findall(r"megatron-muon: plan ([0-9a-f]+)", run.output))
    for figures in (plan(training, *own, *SWIGLU), plan(bare, *own, "--use-checkpoint-args")):
        assert figures["digest"] == digest
        assert "has no checkpoint here" not in figures["printed"]
    figures = plan(training, *ours(), *SWIGLU, "--load", "elsewhere")
    assert figures["digest"] != digest
    assert "--load elsewhere has no checkpoint here" in figures["printed"]


@pytest.mark.wide
def test_another_padding_of_the_vocabulary_is_refused_with_the_flag(training: Trainings) -> None:
    """Tensor parallelism pads to multiples of TP size times --make-vocab-size-divisible-by."""
    flags = (*SWIGLU, *TP_2, *cli.words("--make-vocab-size-divisible-by 6"))
    stayed = losses(upstream(training, *flags, "--save", "upstream"))
    load = (*ours(), *SWIGLU, *cli.words("--load upstream --ckpt-step 2"))
    run = training(*load)
    assert run.returncode == 2
    assert "embedding.word_embeddings.weight is (264, 40) in the checkpoint" in run.output
    assert "for the same padding, use --make-vocab-size-divisible-by 264" in run.output
    assert_same(losses(training(*load, *cli.words("--make-vocab-size-divisible-by 264"))), stayed)


@pytest.mark.wide
@pytest.mark.parametrize("positions", [(), ROPE], ids=["learned", "rope"])
def test_curves_are_upstreams_under_every_strategy(
    training: Trainings, positions: tuple[str, ...]
) -> None:
    """From one seed, with --muon-matrices upstream.

    Story: learned positions were Adam's here and Muon's upstream, 4.8939 against 4.8854 after five
    steps, and no page said so.
    """
    expected = losses(upstream(training, *positions))
    for strategy in STRATEGIES:
        run = training(*ours(strategy), *positions, "--muon-matrices", "upstream")
        assert_same(losses(run), expected)
    run = training(*ours(), *positions, "--muon-matrices", "ours").checked()
    assert (f"{LEARNED} (Muon there, not here)" in run.output) == (not positions)
    differs = losses(run)[6] != pytest.approx(expected[6], abs=10 * TOLERANCE)
    assert differs == (not positions)


@pytest.mark.wide
def test_main_weights_continue_in_bf16(training: Trainings) -> None:
    """Main weights are fp32, and those of the model bf16."""
    stayed = losses(upstream(training, "--bf16", "--save", "upstream"))
    run = training(*ours(), *cli.words("--bf16 --load upstream --ckpt-step 2 --save ours"))
    assert losses(run)[3] == pytest.approx(stayed[3], abs=TOLERANCE)
    assert losses(run)[6] == pytest.approx(stayed[6], abs=2e-3)
    export(training, "ours", 4, "back").checked()
    back = losses(upstream(training, "--bf16", "--load", "back"))
    assert back[5] == pytest.approx(losses(run)[5], abs=TOLERANCE)


@pytest.mark.wide
def test_the_layer_wise_optimizer_continues(training: Trainings) -> None:
    """dist_muon, in bf16: fp32 ends in an AttributeError, and gloo gathers even shards only."""
    flags = cli.words("--optimizer dist_muon --bf16 --save upstream")
    stayed = losses(upstream(training, *flags, ranks=1))
    run = training(*ours(), *cli.words("--bf16 --load upstream --ckpt-step 2"))
    assert "start at zero" not in run.output
    assert losses(run)[3] == pytest.approx(stayed[3], abs=1e-3)
    assert losses(run)[6] == pytest.approx(stayed[6], abs=2e-3)


@pytest.mark.wide
def test_a_run_on_gpus_is_exported_without_one(training: Trainings) -> None:
    """Transformer Engine's flags; FusedAdam's counts, by group. Both end in an error or in silence
    where an export leaves them out.
    """
    stayed = losses(upstream(training, "--save", "upstream"))
    training(*ours(), *cli.words("--load upstream --ckpt-step 2 --save ours")).checked()
    folder = folders.iteration_folder(training.folder / "ours", 4)
    state = content.read(folder)
    vars(state["args"]).update(OF_GPUS)
    for name in [name for name in state if name.endswith(f".{STEP}")]:
        parameter = name.removeprefix("optimizer.state.").removesuffix(f".{STEP}")
        state[content.setting(parameter, STEP)] = int(state.pop(name))
    rewrite(folders.iteration_folder(training.folder / "gpu", 4), state)
    export(training, "gpu", 4, "back").checked()
    assert_same(losses(upstream(training, "--load", "back")), stayed)
    args = read_object(folders.iteration_folder(training.folder / "back", 4), COMMON)["args"]
    assert OF_GPUS.items() <= vars(args).items()

    for name in [name for name in state if name.endswith(f".{STEP}")]:
        del state[name]
    rewrite(folders.iteration_folder(training.folder / "uncounted", 4), state)
    run = export(training, "uncounted", 4, "lost")
    assert run.returncode == 2
    assert "decoder.final_layernorm.bias has no step" in run.output


def rewrite(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint with this content."""
    writer = FileSystemWriter(folders.begin(folder))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=writer, planner=planner, no_dist=True)
    folders.finish(folder)


@pytest.mark.wide
def test_export_refuses_what_upstream_cannot_continue(training: Trainings) -> None:
    training(*ours(), "--save", "positions").checked()
    run = export(training, "positions", 4, "back")
    assert run.returncode == 2
    assert f"{LEARNED} (Muon there, not here)" in run.output
    assert "--muon-matrices upstream" in run.output
    training(*ours(), *ROPE, "--disable-bias-linear", "--save", "usual").checked()
    state = content.read(folders.iteration_folder(training.folder / "usual", 4))
    vars(state["args"]).update(LATENT)
    usual = [name for name in state if ".self_attention." in name]
    modules = {name.partition("self_attention.")[0] for name in usual if "model." in name}
    for name in usual:
        del state[name]
    for module in modules:
        for name, shape in LATENT_SHAPES.items():
            weight = f"{module}self_attention.{name}.weight"
            state[weight] = torch.randn(shape)
            momentum = weight.replace("model.", "optimizer.state.", 1)
            state[f"{momentum}.momentum_buffer"] = torch.randn(shape)
    rewrite(folders.iteration_folder(training.folder / "latent", 4), state)
    run = export(training, "latent", 4, "back")
    assert run.returncode == 2
    assert "linear_kv_up_proj.weight (one block there)" in run.output
    state["args"].muon_matrices = "upstream"
    rewrite(folders.iteration_folder(training.folder / "alike", 4), state)
    export(training, "alike", 4, "there").checked()
    training(*ours(), *ROPE, *cli.words("--muon-lr 0.02 --save rates")).checked()
    run = export(training, "rates", 4, "back")
    assert run.returncode == 2
    assert "megatron-core's own Muon has no --muon-lr" in run.output
