"""What the estimates of `megatron-muon plan` say of steps that others have measured and published, and how far off.

    python -m benchmarks.backtest

Needs no GPU. Each published step is simulated as its authors describe it: their matrices, ranks and
machine, their iteration and their way of sharing the work, with this package's planner, cost model
and hardware profiles. What a source does not say is assumed, and `ASSUMED` says so. Nothing is
fitted to the published figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_muon.core.cost import (
    DENSE,
    GRAM,
    KERNEL,
    STANDARD,
    SUM_BYTES,
    Iteration,
    ProductCounts,
)
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.memory import Memory
from megatron_muon.tools.plan.estimate import (
    HARDWARE,
    LINK_SHARE,
    Group,
    GroupPlan,
    Hardware,
    PlanSettings,
    plan_group,
)
from megatron_muon.tools.plan.training_step import holder_bytes, owner_bytes

ASSUMED = (
    (
        'Megatron-LM: neither thread names its model ("production matrix shapes") or says how many'
        " matrices are timed, and #6683 no parallel sizes. Assumed: those of #6676 for both (tensor"
        " parallel 2, weights over 8, experts over 8 x 2), all of NVIDIA Nemotron 3 Super (120B,"
        " hidden size 4096; 40 Mamba, 40 mixture and 8 attention layers; 512 experts of 1024 x 2688"
        " a layer), no pipeline, momentum exchanged in fp32, five standard steps in bf16 without"
        " the symmetric kernel, all 32 GB300 in one NVLink domain."
    ),
    (
        "DMuon, 8 A800: its page has models, GPUs and iteration (Gram with one restart, symmetric"
        " kernels, five steps). Assumed: fp32 weights and state; PyTorch's AdamW with its defaults,"
        " a pass over memory for each operation."
    ),
    (
        "DMuon, 16 nodes: its page has step times alone; an earlier one says 128 A800. Assumed: 8"
        " GPUs a node, the matrices of Qwen2.5-VL-3B for WallX and of PaliGemma-3B with its action"
        " expert for Pi0, one owner a matrix over all 128 GPUs, and that broadcasts and reductions"
        " hide behind forward and backward. The third model of that page, Wall-WM (+3.4 %), has no"
        " published sizes."
    ),
)

FOREACH_ADAMW_BYTES = 80
"""Of a parameter, in `torch.optim.AdamW` with foreach, its default on CUDA: decay 8, first moment 12, second 8 and 12,
root 8, bias correction 8, eps 8, quotient 16."""

GB300 = HARDWARE["gb300"]
A800 = replace(HARDWARE["a100-sxm"], name="a800-sxm", node_gb_per_s=200 * LINK_SHARE)
"""An A100 with 400 GB/s of NVLink, both ways together."""

SYMMETRIC = replace(KERNEL, symmetric=0.5, from_rows=1, multiple_of=1)
"""Every symmetric product at half of its operations."""

Shapes = Sequence[tuple[int, int]]


class OneRestart(Iteration):
    """The Gram iteration with one restart, of runs of two and three steps, as DMuon and gram-newton-schulz have it."""

    def counts(self, method: str) -> ProductCounts:
        """As `Iteration`, of two runs."""
        return ProductCounts(gram=2, square=self.steps, symmetric=3 * (self.steps - 2), wide=2)


@dataclass(frozen=True)
class Line:
    """A published figure, in `unit`, and what the simulation gives for it."""

    source: str
    what: str
    unit: str
    published: float
    predicted: float

    def cells(self) -> list[str]:
        """A line of the table; errors are relative, or in points where the figures are shares."""
        published, figure = self.published, self.predicted
        if self.unit == "%":
            shown = [f"{published:+.1f} %", f"{figure:+.1f} %", f"{figure - published:+.1f} points"]
        else:
            shown = [
                *(f"{each} {self.unit}".strip() for each in (f"{published:.4g}", f"{figure:.3g}"))
            ]
            shown.append(f"{figure / published - 1:+.0%}")
        return [self.source, self.what, *shown]


def planned(shapes: Shapes, ranks: int, settings: PlanSettings, hardware: Hardware) -> GroupPlan:
    """Matrices whose rows are spread over the ranks evenly, each owned by one, with room for all in one wave."""
    cut = {
        shape: row_sharded(
            "", shape, [shape[0] * (r + 1) // ranks - shape[0] * r // ranks for r in range(ranks)]
        )
        for shape in set(shapes)
    }
    matrices = (replace(cut[shape], name=str(number)) for number, shape in enumerate(shapes))
    return plan_group(Group("dense", Layout(ranks, tuple(matrices))), settings, hardware)


def numel(shapes: Shapes) -> int:
    """Elements of all matrices."""
    return sum(rows * cols for rows, cols in shapes)


# --- Megatron-LM, https://github.com/NVIDIA/Megatron-LM/issues/6676 and /pull/6683

_MAMBA, _ATTENTION = (
    [(18560, 4096), (4096, 8192)],
    [
        (4096, 4096),
        (256, 4096),
        (256, 4096),
        (4096, 4096),
    ],
)
# router, latent, shared expert
_MIXTURE = [(512, 4096), (1024, 4096), (4096, 1024), (5376, 4096), (4096, 5376)]
TENSOR, REMAT, EXPERT, EXPERT_REMAT, COPIES = 2, 8, 8, 2, 2
"""Of 32 GPUs: tensor parallel, GTP's weight shards, expert parallel, its weight shards, data parallel."""
DENSE_MATRICES: Shapes = 40 // COPIES * (_MAMBA + _MIXTURE) + 8 // COPIES * _ATTENTION
EXPERT_MATRICES: Shapes = 40 * 512 // EXPERT // COPIES * [(2688, 1024), (1024, 2688)]
"""Of a data-parallel copy, as the layer-wise optimizer shares matrices out, and of an expert-parallel rank."""


def megatron() -> Iterator[Line]:
    """Optimizer steps on 32 GB300 in the three modes of `--muon-tp-mode`."""
    iteration = Iteration("quintic", 5, "medium", STANDARD, DENSE)
    settings = PlanSettings(1e9, Memory(4, iteration), team_size="1")
    domains = (DENSE_MATRICES, TENSOR * REMAT, REMAT), (EXPERT_MATRICES, EXPERT_REMAT, EXPERT_REMAT)
    held = sum(numel(shapes) / ranks for shapes, ranks, _ in domains)
    elementwise_ms = (
        held * (holder_bytes(settings) + owner_bytes(settings)) / GB300.memory_gb_per_s / 1e6
    )
    duplicated = distributed = sharded = elementwise_ms
    for shapes, ranks, row_ranks in domains:
        gathered = 4 * numel(shapes) * (1 - 1 / ranks) / GB300.node_gb_per_s / 1e6
        flops = sum(iteration.flops(*shape) for shape in shapes)
        duplicated += gathered + flops / GB300.bf16_tflops / 1e9
        distributed += sum(_distributed_ms(shape, row_ranks, iteration) for shape in shapes)
        owned = planned(shapes, ranks, settings, GB300)
        # one all-to-all, all matrices, one all-to-all back
        sharded += owned.ns_ms + owned.exchange_ms
    for source, what, published, predicted in (
        ("#6676", "duplicated", 632, duplicated),
        ("#6676", "distributed", 356, distributed),
        ("#6676", "layer-sharded", 157, sharded),
        ("#6683", "duplicated", 264, duplicated),
        ("#6683", "layer-sharded", 139, sharded),
    ):
        yield Line(f"Megatron-LM {source}", f"optimizer step, {what}", "ms", published, predicted)
    for source, ratio in (("#6676", 4.03), ("#6683", 1.90)):
        yield Line(
            f"Megatron-LM {source}", "duplicated / layer-sharded", "", ratio, duplicated / sharded
        )


def _distributed_ms(shape: tuple[int, int], ranks: int, iteration: Iteration) -> float:
    """Each rank iterates over its rows: its columns' Gram matrix, summed over the ranks in every step."""
    rows, cols = shape[0] / ranks, shape[1]
    flops = iteration.steps * (2 * 2 * cols**2 * rows + 2 * cols**3)
    summed = iteration.steps * 2 * (1 - 1 / ranks) * SUM_BYTES * cols**2
    return flops / GB300.bf16_tflops / 1e9 + summed / GB300.node_gb_per_s / 1e6


# --- DMuon, https://github.com/X-Square-Robot/dmuon (README.md, docs/llm_benchmark.md)


@dataclass(frozen=True)
class Transformer:
    """Projections of a transformer's layers, and how many parameters all of the model has."""

    layers: int
    hidden: int
    ffn: int
    query: int
    key: int
    parameters: float

    @property
    def matrices(self) -> Shapes:
        """Query, key, value, output, gate, up and down of each layer."""
        q, k, f = (self.query, self.hidden), (self.key, self.hidden), (self.ffn, self.hidden)
        return self.layers * [q, k, k, q[::-1], f, f, f[::-1]]


_SIGLIP = 27 * [*4 * [(1152, 1152)], (4304, 1152), (1152, 4304)]
_QWEN_VISION = 32 * [(1280, 1280), (3420, 1280), (3420, 1280), (1280, 3420)]
QWEN_1B = Transformer(28, 1536, 8960, 1536, 256, 1.54e9)
LLAMA_3B = Transformer(28, 3072, 8192, 3072, 1024, 3.61e9)
QWEN_7B = Transformer(28, 3584, 18944, 3584, 512, 7.62e9)
LLAMA_8B = Transformer(32, 4096, 14336, 4096, 1024, 8.03e9)
QWEN_VL_3B = Transformer(36, 2048, 11008, 2048, 256, 3.75e9)
GEMMA_2B = Transformer(18, 2048, 16384, 2048, 256, 3.3e9)  # with SigLIP and the action expert
ACTION = Transformer(18, 1024, 4096, 2048, 256, 0)


def dmuon_optimizer_ms(shapes: Shapes, parameters: float, ranks: int) -> tuple[float, float]:
    """Milliseconds of the optimizer with AdamW for all, and with DMuon, whose owners have whole gradients already."""
    iteration = OneRestart("polar_express", 5, "medium", GRAM, SYMMETRIC)
    settings = PlanSettings(1e9, Memory(2, iteration), team_size="1")
    owned = planned(shapes, ranks, settings, A800)
    plan = owned.plan
    elements = [0] * ranks
    for owner, matrix in zip(plan.owners, plan.layout.matrices, strict=True):
        elements[owner] += matrix.numel
    most = max(elements) * (holder_bytes(settings) + owner_bytes(settings))
    others = (parameters - numel(shapes)) / ranks * FOREACH_ADAMW_BYTES
    per_ms = A800.memory_gb_per_s * 1e6
    return parameters / ranks * FOREACH_ADAMW_BYTES / per_ms, owned.ns_ms + (most + others) / per_ms


def dmuon() -> Iterator[Line]:
    """Optimizer steps on 8 A800, and training steps on 16 nodes against AdamW's."""
    for name, model, adamw, muon in (
        ("Qwen2.5-1.5B", QWEN_1B, 16.9, 32.4),
        ("Llama-3.2-3B", LLAMA_3B, 26.4, 99.4),
        ("Qwen2.5-7B", QWEN_7B, 53.9, 189.2),
        ("Llama-3.1-8B", LLAMA_8B, 55.0, 261.7),
    ):
        with_adamw, with_muon = dmuon_optimizer_ms(model.matrices, model.parameters, 8)
        yield Line("DMuon, 8 A800", f"AdamW's step, {name}", "ms", adamw, with_adamw)
        yield Line("DMuon, 8 A800", f"DMuon's step, {name}", "ms", muon, with_muon)
    for name, shapes, parameters, adamw, muon in (
        ("WallX", [*QWEN_VL_3B.matrices, *_QWEN_VISION], QWEN_VL_3B.parameters, 1259, 1285),
        ("Pi0", [*GEMMA_2B.matrices, *ACTION.matrices, *_SIGLIP], GEMMA_2B.parameters, 1617, 1645),
        ("Llama-3.1-8B, FSDP", LLAMA_8B.matrices, LLAMA_8B.parameters, 1271, 1372),
        ("Llama-3.1-8B, HSDP", LLAMA_8B.matrices, LLAMA_8B.parameters, 1348, 1412),
    ):
        with_adamw, with_muon = dmuon_optimizer_ms(shapes, parameters, 128)
        added, published = 100 * (with_muon - with_adamw) / adamw, 100 * (muon / adamw - 1)
        yield Line("DMuon, 16 nodes", f"training step over AdamW's, {name}", "%", published, added)


def table() -> list[str]:
    """The table as Markdown."""
    rows = [["source", "figure", "published", "simulated", "error"], ["---"] * 5]
    rows += [line.cells() for lines in (megatron(), dmuon()) for line in lines]
    return [f"| {' | '.join(row)} |" for row in rows]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, then what is assumed."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    print("\n".join([*table(), "", *(f"- {line}" for line in ASSUMED)]))


if __name__ == "__main__":
    main()
