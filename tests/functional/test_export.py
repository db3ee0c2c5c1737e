"""What export writes computes what Megatron does, and Megatron loads what import and export
write.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon import cli
from tests.support.cli import make_corpus
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

TOLERANCE = 1e-4
"""Of logits, in fp32: the two add up in other orders. Seen: 3e-7 of logits up to 1.5."""

SIZES = shlex.split(
    "--num-layers 2 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --make-vocab-size-divisible-by 16 --micro-batch-size 1"
    " --global-batch-size 4 --train-iters 2 --eval-iters 0 --attention-dropout 0.0"
    " --hidden-dropout 0.0 --log-interval 1 --split 98,2,0"
)
MUON = "--optimizer muon --use-megatron-fsdp --lr 0.02 --init-method-std 0.1"
ROPE = "--position-embedding-type rope"
BIASED = f"--normalization RMSNorm --swiglu {ROPE}"
LLAMA = f"{BIASED} --disable-bias-linear"
GROUPS = "--group-query-attention --num-query-groups 2"
UNTIED = "--untie-embeddings-and-output-weights"
MIXTURE = f"{LLAMA} {GROUPS} {UNTIED} --num-experts 4 --moe-router-topk 2"
SHARED = (
    f"{LLAMA} {GROUPS} --num-experts 4 --moe-layer-freq ([0]*1+[1]*1) --moe-router-topk 2"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 24"
)
"""A dense layer, then one with experts as in DeepSeek, except for its attention."""
LEARNED = "--position-embedding-type learned_absolute"
MODELS = {
    "llama": f"{LLAMA} {GROUPS} {UNTIED}",
    "llama tied": LLAMA,
    "llama with biases": f"{BIASED} {GROUPS} {UNTIED}",
    "llama scaled": f"{LLAMA} --use-rope-scaling --rotary-base 500000",
    "qwen2": f"{LLAMA} {GROUPS} --add-qkv-bias",
    "qwen3": f"{LLAMA} {GROUPS} {UNTIED} --qk-layernorm --kv-channels 16",
    "mixtral": MIXTURE,
    "qwen3_moe": f"{MIXTURE} --qk-layernorm --moe-ffn-hidden-size 24",
    "gpt2": LEARNED,
    "gpt2 without biases": f"{LEARNED} --disable-bias-linear {UNTIED}",
    "shared experts": SHARED,
    "squared relu": f"--squared-relu --no-bias-gelu-fusion {ROPE} --rotary-percent 0.5",
}
ZERO = "--data-parallel-sharding-strategy"
TP = "--tensor-model-parallel-size 2"
EP = "--expert-model-parallel-size 2"
LAYOUTS = {
    "no_shard": (2, f"{ZERO} no_shard"),
    "zero-1": (2, f"{ZERO} optim"),
    "zero-2": (2, f"{ZERO} optim_grads"),
    "zero-3": (2, ""),
    "four ranks": (4, ""),
    "TP 2": (2, TP),
    "TP 2 x DP 2": (4, f"{TP} --sequence-parallel"),
    "EP 2": (2, EP),
    "EP 2 x TP 2": (4, f"{TP} --sequence-parallel {EP}"),
    "HSDP": (4, "--num-distributed-optimizer-instances 2"),
    "bf16": (2, "--bf16"),
}
"""Ranks, and flags added to ZeRO-3."""

MISSING = {
    "shared experts": "--moe-shared-expert-intermediate-size 24",
    "squared relu": "--squared-relu True",
}
"""Models that only Megatron has, and why."""
CASES = [
    *((model, "zero-3") for model in MODELS if model not in MISSING),
    *(("llama", name) for name in LAYOUTS if not name.startswith(("EP", "zero-3"))),
    *(("mixtral", name) for name in ("EP 2", "EP 2 x TP 2", "no_shard")),
    ("gpt2", "TP 2"),
    ("qwen3", "TP 2 x DP 2"),
]
COME_BACK = [model for model in MODELS if model not in ("gpt2 without biases", *MISSING)]
"""Hugging Face's GPT-2 has biases: a model without them comes back with zeros."""

Trained = Callable[[str, str], Path]
OFTEN = [("llama", "TP 2 x DP 2"), ("mixtral", "EP 2")]


@pytest.fixture(scope="module")
def train(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("export")
    return Trainings(ranks, folder, (*make_corpus(folder), *SIZES, "--device", "cpu"))


@pytest.fixture(scope="module")
def trained(train: Trainings) -> Trained:
    """The checkpoint of a model that two steps on a layout have trained; made once."""
    made: dict[tuple[str, str], Path] = {}

    def checkpoint(model: str, name: str) -> Path:
        if (model, name) not in made:
            ranks, flags = LAYOUTS[name]
            made[model, name] = place = train.folder / f"{model}-{name}".replace(" ", "-")
            line = f"{MUON} {MODELS[model]} {ZERO} optim_grads_params {flags} --save-interval 2"
            train(*shlex.split(line), "--save", str(place), ranks=ranks).checked()
        return made[model, name]

    return checkpoint


def tokens() -> torch.Tensor:
    return torch.randint(0, 257, (3, 30), generator=torch.Generator().manual_seed(1))


def logits_of_megatron(rank: int, world_size: int, *, argv: list[str], folder: str) -> torch.Tensor:
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
            found.append(model[0].eval()(ids, torch.arange(length).expand_as(ids), mask))
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
    words = shlex.split(f"--finetune {MODELS[model]} {flags}")
    line = train.line("--load", str(load), *words, ranks=1)
    (logits,) = train.ranks(1, logits_of_megatron, argv=line, folder=str(train.folder))
    return logits[..., :257]


def transformers(folder: Path) -> torch.Tensor:
    """Logits of an exported folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(tokens()).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def rows(name: str) -> str:
    """The flag by which one rank pads the vocabulary as a layout's ranks do."""
    return f"--make-vocab-size-divisible-by {32 if 'TP 2' in name else 16}"


def command(*words: object, status: int = 0) -> None:
    assert cli.main([str(word) for word in words]) == status


def export(checkpoint: Path, to: str, out: Path, *flags: str, status: int = 0) -> None:
    command("export", "--checkpoint", checkpoint, "--to", to, out, *flags, status=status)


@pytest.mark.parametrize(("model", "name"), wide_but(OFTEN, dict.fromkeys(CASES)))
def test_an_exported_model_has_megatrons_logits(
    train: Trainings, trained: Trained, tmp_path: Path, model: str, name: str
) -> None:
    checkpoint = trained(model, name)
    export(checkpoint, "hf", tmp_path / "hf", "--dtype", "float32")
    theirs = transformers(tmp_path / "hf")
    ours = megatron(train, model, checkpoint, f"{MUON} {rows(name)}")
    assert ours.std() > 0.1  # not all alike
    torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "model", wide_but(["llama"], ["llama", "gpt2", "mixtral", "qwen3_moe", *MISSING])
)
def test_megatron_loads_an_export_to_torch_dist(
    train: Trainings,
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
) -> None:
    """Without Megatron-FSDP, as its own tools do; an export to Hugging Face reads the same, or
    refuses it.
    """
    export(trained(model, "zero-3"), "torch_dist", tmp_path / "dist")
    adam = "--optimizer adam --lr 0.1 --ckpt-format torch_dist"
    ours = megatron(train, model, tmp_path / "dist", adam)
    if model in MISSING:
        before = megatron(train, model, trained(model, "zero-3"), MUON)
        torch.testing.assert_close(ours, before, atol=1e-6, rtol=0)
        export(tmp_path / "dist", "hf", tmp_path / "hf", status=2)
        assert MISSING[model] in capsys.readouterr().err
        return
    export(tmp_path / "dist", "hf", tmp_path / "hf")
    torch.testing.assert_close(transformers(tmp_path / "hf"), ours, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("model", wide_but(["gpt2"], COME_BACK))
def test_an_imported_model_has_its_logits_in_megatron_and_comes_back_to_the_last_bit(
    train: Trainings, trained: Trained, tmp_path: Path, model: str
) -> None:
    export(trained(model, "zero-3"), "hf", tmp_path / "hf")
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    ours = megatron(train, model, tmp_path / "in", f"{MUON} --make-vocab-size-divisible-by 128")
    torch.testing.assert_close(transformers(tmp_path / "hf"), ours, atol=TOLERANCE, rtol=0)
    export(tmp_path / "in", "hf", tmp_path / "out")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


def test_an_import_is_trained_with_its_own_flags(
    ranks: Pool, train: Trainings, trained: Trained, tmp_path: Path
) -> None:
    """On two ranks, by the experiment file that import writes; the loss starts where training left
    it.
    """
    checkpoint = trained("llama", "TP 2 x DP 2")
    export(checkpoint, "hf", tmp_path / "hf")
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    data = train.flags[train.flags.index("--data-path") :][:2]
    batch = (
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 0.001 --split 98,2,0"
        " --log-interval 1 --device cpu"
    )
    config = ("--config", str(tmp_path / "in" / "model.yaml"))
    run = Trainings(ranks, train.folder, (*config, *data, *shlex.split(batch)))()
    assert run.returncode == 0, run.output[-3000:]
    assert run.iterations[0].loss < 5.5  # what two steps have learnt: random weights have over 5.6


def test_text_is_written_and_evaluated(
    train: Trainings, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a checkpoint and from its export alike; the loss is that of Megatron's logits."""
    checkpoint = trained("mixtral", "EP 2")
    text, hf, file = tmp_path / "text.txt", tmp_path / "hf", tmp_path / "json"
    export(checkpoint, "hf", hf)
    text.write_text("One line of text, é, which data prepare does not cut.\n", "utf-8")
    command("data", "prepare", "--input", text, "--output", tmp_path / "text")

    def said(place: Path, *words: object) -> str:
        capsys.readouterr()
        command("generate", "--checkpoint", place, "--temperature", 0, *words)
        return capsys.readouterr().out

    def figures(place: Path, *words: object) -> dict[str, Any]:
        command("eval", "--checkpoint", place, *words, "--sequence-length", 32, "--json", file)
        found: dict[str, Any] = json.loads(file.read_text())
        return {name: value for name, value in found.items() if name not in ("checkpoint", "data")}

    quick = ("--prompt", "the quick", "--max-new-tokens", 12)
    assert said(checkpoint, *quick) == said(hf, *quick)
    assert said(hf, *quick).startswith("the quick")
    before, _, after = said(hf, "--prompt", "the", "--untrained").partition("after training:")
    assert after.strip() != before.partition("before training:")[2].strip()
    assert figures(hf, "--data", tmp_path / "text") == figures(hf, "--text", text)
    assert "evaluating ..." in capsys.readouterr().err
    first, second = (figures(place, "--data", train.folder / "tiny") for place in (checkpoint, hf))
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    documents = 60
    assert (
        first["tokens"]
        == first["bytes"] + documents
        == os.path.getsize(train.folder / "tiny.bin") // 2
    )
    bits = first["loss"] / 0.6931471805599453 * first["tokens"] / first["bytes"]
    assert first["bits_per_byte"] == pytest.approx(bits)
    assert 2 < first["loss"] < 5.6
