"""The kernels in Triton's interpreter, on tensors of a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from megatron_muon.core import launches


def _rounded(given: Any) -> Any:
    """Triton's interpreter 3.7 cuts off the bits that a bf16 lacks; a GPU rounds to even."""
    convert = given

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert(data, source, target, mode)
        bits = data.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        rounded = np.where(np.isnan(data.view(np.float32)), 0x7FC0, rounded)
        return rounded.astype(np.uint16)

    return rounding


@contextmanager
def interpreted() -> Iterator[Counter[str]]:
    """Kernels take the passes, in the interpreter; yields how often each is launched."""
    launched = Counter[str]()
    launch = launches.launch

    def counting(kernel: str, programs: int, *args: Any) -> None:
        launched[kernel] += programs > 0
        launch(kernel, programs, *args)

    with (
        mock.patch.object(interpreter, "_convert_float", _rounded(interpreter._convert_float)),
        mock.patch.object(launches, "has_kernels", return_value=True),
        mock.patch.object(launches, "launch", counting),
        np.errstate(all="ignore"),
    ):
        yield launched
