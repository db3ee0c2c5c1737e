"""The kernels of the passes, interpreted and compiled."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_muon.core import kernels
from megatron_muon.core.tiles import SHAPES
from tests.support import warm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("not wide", marks=pytest.mark.timeout(300)),
        pytest.param("wide", marks=[pytest.mark.wide, pytest.mark.timeout(1800)]),
    ],
)
def test_interpreted(chosen: str) -> None:
    """`tests/interpreted`, in a process in which Triton interprets."""
    command = [sys.executable, "-m", "pytest", "tests/interpreted", "-q", "-p", "no:xdist"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop(warm.SHARED, None)
    done = subprocess.run(
        [*command, "-m", chosen], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]


POINTERS = {
    "tiles": "*i32",
    "largest": "*i32",
    "counters": "*i32",
    "groups": "*i32",
    "seeds": "*i32",
    "numbers": "*fp32",
    "failed": "*fp32",
    "firsts": "*fp32",
    "factors": "*fp32",
    "sums": "*fp32",
    "partial": "*fp32",
    "before": "*fp32",
    "after": "*fp32",
    "roots": "*fp32",
    "least": "*fp32",
    "of_weights": "*fp32",
    "of_updates": "*fp32",
    "m": "i32",
    "numel": "i32",
    "count": "i32",
    "added": "fp32",
}
"""Types of arguments; of elements on the wire, bf16; of all others, int64."""
ELEMENTS = ("out", "lane", "stacks", "updates", "given", "q")
SIZES = {
    "aligned": 8,
    "tall_aligned": 8,
    "size": 1024,
    "parts": 4,
    "width": 64,
    "depth": 64,
    "stored": 0,
}
FORMS: dict[str, list[dict[str, int]]] = {
    "advance": [{"stored": stored, "alone": stored != 1} for stored in range(3)],
    "find": [{}],
    "fill": [{}],
    "drain": [{}],
    "level": [{}],
    "neurons": [{}],
    "normalize": [{}],
    "descend": [
        {"decay": 2, "holds": 0, "moment": 2},
        {"decay": 1, "moment": 0, "half": 0, "holds": 0},
        {"decay": 0, "moment": 0},
    ],
    "total": [{}],
    "move": [{}],
    "divide": [{}, {"m": 1, "numel": 1}],
    "shift": [{}, {"m": 1, "numel": 1}],
}
"""Constants of each kernel to compile; those that are not named are 1."""


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", FORMS)
def test_kernels_compile_for_gpus(name: str, capability: int) -> None:
    kernel = getattr(kernels, name)
    for form, (rows, cols) in zip(FORMS[name], itertools.cycle(SHAPES), strict=False):
        given = {"rows": rows, "cols": cols} | SIZES | form
        signature, constants = {}, {}
        for parameter in kernel.params:
            arg = parameter.name
            if parameter.is_constexpr or arg in form:  # 1 is compiled as a constant
                signature[arg] = "constexpr"
                constants[arg] = given.get(arg, 1)
            else:
                signature[arg] = POINTERS.get(arg, "*bf16" if arg in ELEMENTS else "*i64")
        if name == "normalize":
            signature["weights"] = signature["scales"] = "*fp32"
        if name in ("neurons", "descend"):
            signature["scales"] = "*fp32"
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"num_warps": 8}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert f"sm_{capability}" in compiled.asm["ptx"]


def test_every_kernel_is_compiled() -> None:
    launched = {name for name, one in vars(kernels).items() if isinstance(one, triton.JITFunction)}
    assert {name for name in launched if not name.startswith("_")} == set(FORMS)
