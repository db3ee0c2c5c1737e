"""The device of a run: CUDA where torch can use it, else the CPU; and peak rates of GPUs."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from megatron_muon.errors import UserError

_DEVICES = Path("/dev")

BF16_TFLOPS = {
    "A100": 312.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
}
"""Dense bf16 TFLOPS of NVIDIA's data sheets, by a part of a GPU's name; by default of the SXM."""


def bf16_tflops(name: str) -> float | None:
    """The peak rate of a whole GPU of this name; None if unknown."""
    known = [key for key in BF16_TFLOPS if re.search(rf"(?<![A-Z0-9]){key}(?![A-Z0-9])", name)]
    return BF16_TFLOPS[max(known, key=len)] if known and " MIG " not in name else None


def refuse_unusable_gpu(wanted: str) -> None:
    """Refuse `--device auto` where it would take the CPU although the machine has a GPU."""
    why = unusable_gpu() if wanted == "auto" else None
    if why is not None:
        raise UserError(
            f"--device auto: torch cannot use this machine's GPU: {why}; fix that, or use --device"
            " cpu"
        )


def unusable_gpu(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why torch cannot use this machine's NVIDIA GPU; None if it can, or none is visible."""
    import torch

    is_hidden = environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles")
    if torch.cuda.is_available() or is_hidden:
        return None
    if not any(_DEVICES.glob("nvidia[0-9]*")) and torch.cuda._device_count_nvml() < 1:
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__} says: {str(error).splitlines()[0].rstrip('.')}"
    return f"torch {torch.__version__} finds no device; see nvidia-smi"


def no_transformer_engine() -> str:
    """Why Transformer Engine, its attention and its FusedAdam cannot be imported; or empty."""
    try:
        metadata.version("transformer-engine")
        te = importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam  # noqa: B018
        te.DotProductAttention  # noqa: B018
    except metadata.PackageNotFoundError:
        return "is not installed"
    except Exception as error:  # a build for another torch raises any loader error
        return f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def settle_device(wanted: str, *, on_paper: bool = False) -> str:
    """Resolve "auto" to "cuda" or "cpu", and install the CPU backend for the latter.

    `on_paper`: nothing is to run; without CUDA the CPU backend stands in while settings are
    checked.

    Raises:
        UserError: "cuda" without CUDA, fewer GPUs than ranks, or "auto" with an unusable GPU.
    """
    import torch

    from megatron_muon import cpu

    has_cuda = torch.cuda.is_available() and not cpu.installed()
    if has_cuda and wanted != "cpu":
        count = torch.cuda.device_count()
        if int(os.environ.get("LOCAL_RANK", "0")) >= count and not on_paper:
            raise UserError(
                f"each rank needs a GPU of its own, and this machine has {count}; use"
                f" --nproc-per-node {count}"
            )
        return "cuda"
    if wanted == "cuda" and not on_paper:
        raise UserError(
            "--device cuda: torch finds no CUDA device here; use --device cpu, or check nvidia-smi"
        )
    if not has_cuda:
        refuse_unusable_gpu(wanted)
    cpu.install(force=wanted == "cpu")
    cpu.keep_freed_memory()
    return "cuda" if wanted == "cuda" else "cpu"
