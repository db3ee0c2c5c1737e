"""The kernels of the passes, interpreted and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_muon.core import kernels
from megatron_muon.core.tiles import FLAT, TALL

ROOT = Path(__file__).parents[2]


def test_interpreted() -> None:
    """`tests/interpreted`, in a process in which Triton interprets."""
    command = [sys.executable, "-m", "pytest", "tests/interpreted", "-q", "-p", "no:xdist"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


POINTERS = {
    "tiles": "*i32",
    "pieces": "*i64",
    "slots": "*i32",
    "matrices": "*i64",
    "gradients": "*i64",
    "momenta": "*i64",
    "weights": "*i64",
    "groups": "*i32",
    "numbers": "*fp32",
    "failed": "*fp32",
    "firsts": "*fp32",
    "largest": "*i32",
    "count": "i32",
}
FLAGS = ("half", "nesterov", "may_fail", "noted", "decays")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("name", ["advance", "fill", "drain", "descend", "factors"])
def test_kernels_compile_for_gpus(name: str, tall: bool, capability: int) -> None:
    kernel = getattr(kernels, name)
    rows, cols = TALL if tall else FLAT
    shape = {"tile_rows": rows, "tile_cols": cols, "tall": tall, "aligned": 8, "size": 256}
    constants = {arg: shape[arg] for arg in kernel.arg_names if arg in shape}
    constants |= {arg: True for arg in kernel.arg_names if arg in FLAGS}
    signature = {}
    for arg in kernel.arg_names:
        signature[arg] = "constexpr" if arg in constants else POINTERS.get(arg, "*bf16")
    if name == "factors":
        signature["out"] = "*fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"]
