"""Exported models compute what Megatron does, and Megatron loads imported ones."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon import cli
from tests.support.cli import make_corpus, words
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

TOLERANCE = 1e-4
"""Of logits, in fp32: the two add up in other orders. Seen: 3e-7 of logits up to 1.5."""

SIZES = words(
    "--num-layers 2 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --make-vocab-size-divisible-by 16 --micro-batch-size 1"
    " --global-batch-size 4 --train-iters 2 --eval-iters 0 --attention-dropout 0.0"
    " --hidden-dropout 0.0 --log-interval 1 --split 98,2,0 --device cpu"
)
MUON = "--optimizer muon --use-megatron-fsdp --lr 0.02 --init-method-std 0.1"
ROPE = "--position-embedding-type rope"
BIASED = f"--normalization RMSNorm --swiglu {ROPE}"
LLAMA = f"{BIASED} --disable-bias-linear"
GROUPS = "--group-query-attention --num-query-groups 2"
UNTIED = "--untie-embeddings-and-output-weights"
MIXTURE = f"{LLAMA} {GROUPS} {UNTIED} --num-experts 4 --moe-router-topk 2"
MODELS = {
    "llama": f"{LLAMA} {GROUPS} {UNTIED}",
    "llama tied": LLAMA,
    "llama with biases": f"{BIASED} {GROUPS} {UNTIED}",
    "llama scaled": f"{LLAMA} --use-rope-scaling --rotary-base 500000",
    "qwen2": f"{LLAMA} {GROUPS} --add-qkv-bias",
    "qwen3": f"{LLAMA} {GROUPS} {UNTIED} --qk-layernorm --kv-channels 16",
    "mixtral": MIXTURE,
    "qwen3_moe": f"{MIXTURE} --qk-layernorm --moe-ffn-hidden-size 24",
    "gpt2": "--position-embedding-type learned_absolute",
}
STRATEGY = "--data-parallel-sharding-strategy"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
EP = "--expert-model-parallel-size 2"
LAYOUTS = {
    "no_shard": (2, f"{STRATEGY} no_shard"),
    "zero-3": (2, ""),
    "TP 2 x DP 2": (4, TP),
    "EP 2": (2, EP),
    "EP 2 x TP 2": (4, f"{TP} {EP}"),
    "HSDP": (4, "--num-distributed-optimizer-instances 2"),
    "bf16": (2, "--bf16"),
}
"""Ranks, and flags added to ZeRO-3."""

CASES = [
    ("llama", "TP 2 x DP 2"),
    ("mixtral", "EP 2"),
    *((model, "zero-3") for model in MODELS),
    *(("llama", name) for name in ("no_shard", "HSDP", "bf16")),
    ("mixtral", "EP 2 x TP 2"),
    ("gpt2", "TP 2 x DP 2"),
]

Trained = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def train(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("export")
    return Trainings(ranks, folder, (*make_corpus(folder), *SIZES))


@pytest.fixture(scope="module")
def trained(train: Trainings) -> Trained:
    """The checkpoint of a model that two steps on a layout have trained; made once."""
    made: dict[tuple[str, str], Path] = {}

    def checkpoint(model: str, name: str) -> Path:
        if (model, name) not in made:
            ranks, flags = LAYOUTS[name]
            made[model, name] = place = train.folder / f"{model}-{name}".replace(" ", "-")
            line = f"{MUON} {MODELS[model]} {STRATEGY} optim_grads_params {flags} --save-interval 2"
            train(*words(line), "--save", str(place), ranks=ranks).checked()
        return made[model, name]

    return checkpoint


def tokens() -> torch.Tensor:
    return torch.randint(
        0,
        257,
        (3, 30),
        generator=torch.Generator().manual_seed(1),
    )


def logits_of_megatron(
    rank: int,
    world_size: int,
    *,
    argv: list[str],
    folder: str,
) -> torch.Tensor:
    """In a worker: what megatron-core's own model computes before the first step, loaded by its own
    loop (--load).
    """
    import megatron.training
    import megatron.training.training as training

    from megatron_muon.megatron import launch

    sys.modules["__main__"].installed.undo()  # the worker's patches: the run installs its own
    torch.distributed.destroy_process_group = lambda *_: None  # the pool's end needs it
    os.chdir(folder)
    found: list[torch.Tensor] = []

    def look(
        forward: Any,
        model: list[torch.nn.Module],
        *_: Any,
        **__: Any,
    ) -> None:
        ids = tokens()
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            found.append(
                model[0].eval()(ids, torch.arange(length).expand_as(ids), mask),
            )
        raise SystemExit(0)

    pretrain = megatron.training.pretrain

    def start(*args: Any) -> None:
        training.train = look  # in the place of what the patches of this run have put there
        pretrain(*args)

    megatron.training.pretrain = start
    with pytest.raises(SystemExit):
        launch.main(argv)
    return found[0].float()


def megatron(train: Trainings, model: str, load: Path, flags: str) -> torch.Tensor:
    """Logits of a checkpoint in megatron-core, on one rank."""
    more = words(f"--finetune {MODELS[model]} {flags}")
    line = train.line("--load", str(load), *more, ranks=1)
    (logits,) = train.ranks(1, logits_of_megatron, argv=line, folder=str(train.folder))
    return logits[..., :257]


def transformers(folder: Path, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of an exported folder, by default for `tokens`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(tokens() if ids is None else ids).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def rows(name: str) -> str:
    """The flag by which one rank pads the vocabulary as a layout's ranks do."""
    return f"--make-vocab-size-divisible-by {32 if 'TP 2' in name else 16}"


def command(*argv: object) -> None:
    assert cli.main([str(word) for word in argv]) == 0


def export(checkpoint: Path, out: Path, *flags: str) -> None:
    command("export", "--checkpoint", checkpoint, "--to", "hf", out, *flags)


@pytest.mark.parametrize(("model", "name"), wide_but(CASES[:1], dict.fromkeys(CASES)))
def test_an_exported_model_has_megatrons_logits(
    train: Trainings, trained: Trained, tmp_path: Path, model: str, name: str
) -> None:
    checkpoint = trained(model, name)
    export(checkpoint, tmp_path / "hf", "--dtype", "float32")
    theirs = transformers(tmp_path / "hf")
    ours = megatron(train, model, checkpoint, f"{MUON} {rows(name)}")
    assert ours.std() > 0.1  # not all alike
    torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("model", wide_but(["gpt2"], MODELS))
def test_an_imported_model_has_its_logits_in_megatron(
    train: Trainings, trained: Trained, tmp_path: Path, model: str
) -> None:
    export(trained(model, "zero-3"), tmp_path / "hf")
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    ours = megatron(train, model, tmp_path / "in", f"{MUON} --make-vocab-size-divisible-by 128")
    torch.testing.assert_close(transformers(tmp_path / "hf"), ours, atol=TOLERANCE, rtol=0)


@pytest.mark.wide
def test_an_import_is_trained_with_its_own_flags(
    ranks: Pool, train: Trainings, trained: Trained, tmp_path: Path
) -> None:
    """On two ranks, by the experiment file that import writes; the loss starts where training left
    it.
    """
    checkpoint = trained("llama", "TP 2 x DP 2")
    export(checkpoint, tmp_path / "hf")
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    data = train.flags[train.flags.index("--data-path") :][:2]
    batch = (
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 0.001 --split 98,2,0"
        " --log-interval 1 --device cpu"
    )
    config = ("--config", str(tmp_path / "in" / "model.yaml"))
    run = Trainings(ranks, train.folder, (*config, *data, *words(batch)))()
    assert run.returncode == 0, run.output[-3000:]
    assert run.iterations[0].loss < 5.5  # what two steps have learnt: random weights have over 5.6


def test_text_is_written_and_evaluated(
    train: Trainings, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is that of the exported model's own logits."""
    checkpoint = trained("mixtral", "EP 2")
    text = tmp_path / "text.txt"
    text.write_text("One line, é.\n", "utf-8")
    prompt = ("--prompt", "the quick", "--max-new-tokens", 12, "--temperature", 0)

    def printed(name: str, *argv: object) -> str:
        capsys.readouterr()
        command(name, "--checkpoint", checkpoint, *argv)
        return capsys.readouterr().out

    written = printed("generate", *prompt)
    assert written.startswith("the quick")
    assert len(written) > len("the quick\n")
    found = printed("eval", "--text", text)
    export(checkpoint, tmp_path / "hf")
    ids = torch.tensor([[256, *text.read_bytes(), 256]])
    (logits,) = transformers(tmp_path / "hf", ids[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    assert 2 < loss < 5.8
    assert "15 tokens, 14 bytes" in found
    assert f"loss {loss:.4f}, perplexity {loss.exp():.3f}" in found
    assert f"bits per byte {loss * 15 / 14 / math.log(2):.4f}" in found
