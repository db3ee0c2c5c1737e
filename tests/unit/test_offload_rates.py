"""Which device orthogonalises is arithmetic on measured rates."""

import pytest

from megatron_muon.offload.rates import ACCELERATOR, CPU, Rates, faster_device

H100 = Rates(accelerator_flops=400e12, cpu_flops=1e12, copy_bytes=50e9)


@pytest.mark.parametrize(
    ("rates", "flops", "momentum", "gradients", "expected"),
    [
        (H100, 1e13, 4e9, 4e9, ACCELERATOR),  # 0.16 s of streaming, against 10 s of products on the CPU
        (H100, 1e9, 4e9, 4e7, CPU),  # hardly any products, and gradients a hundredth of momentum
        (Rates(1e12, 1e12, 50e9), 1e12, 4e9, 4e9, ACCELERATOR),  # streaming hides behind products, copies do not
    ],
)
def test_the_faster_device(rates, flops, momentum, gradients, expected):
    assert faster_device(rates, flops=flops, momentum_bytes=momentum, gradient_bytes=gradients) == expected
