"""The CPU backend: it maps devices, refuses where a GPU is, leaves no trace, and keeps freed
memory.
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _device as device_context

from megatron_muon import cpu
from megatron_muon.cpu import devices
from megatron_muon.cpu import megatron as cpu_megatron
from megatron_muon.ranks import ALL_GATHER, REDUCE_SCATTER

REALLY_HAS_CUDA = torch.cuda.is_available()


@pytest.fixture
def backend():
    assert not cpu.installed(), "an earlier test left the CPU backend installed"
    cpu.install(force=REALLY_HAS_CUDA)
    yield
    cpu.uninstall()


def output_of(script):
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


@pytest.fixture
def buffers():
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as module

    return module


def surroundings(buffers):
    """All attributes that the backend may replace."""
    import torch._dynamo.config as dynamo_config

    cuda = (
        torch.cuda,
        torch.cuda.memory,
        torch.cuda.random,
        torch.cuda.nvtx,
        torch.accelerator,
    )
    makers = (torch, torch.Tensor, torch.nn.Module, DeviceMesh, device_context.DeviceContext)
    state = {"compiler": dynamo_config.disable}
    for owner in (*cuda, *makers, buffers, dist):
        for name, value in vars(owner).items():
            if "_abc_" not in name:  # caches of its own that torch.Tensor grows
                state[owner, name] = value
    return state


def test_uninstall_leaves_no_trace(buffers):
    cpu.install(force=REALLY_HAS_CUDA)  # also imports modules, which add names of their own
    cpu.uninstall()
    before = surroundings(buffers)
    cpu.install(force=REALLY_HAS_CUDA)
    during = surroundings(buffers)
    cpu.uninstall()
    after = surroundings(buffers)
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    changed = [key for key in before if before[key] is not during[key]]
    assert len(changed) > 50  # the comparison can see a patch


def test_installing_twice_wraps_once(backend):
    """Installing twice once turned torch.FloatTensor into torch.cuda.cuda.FloatTensor."""
    cpu.install(force=True)
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    cpu.uninstall()
    cpu.uninstall()  # taking back twice is harmless
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_refuses_where_cuda_exists_unless_forced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"CUDA is available here.*--device cpu"):
        cpu.install()
    assert not cpu.installed()


def test_a_failed_install_is_rolled_back(monkeypatch):
    original = torch.Tensor.to
    monkeypatch.setattr(devices, "_LIKE", ("empty_like", "no_such_factory"))
    with pytest.raises(RuntimeError, match=r"torch\.no_such_factory"):
        cpu.install(force=REALLY_HAS_CUDA)
    assert not cpu.installed()
    assert torch.Tensor.to is original


@pytest.mark.parametrize(
    "device",
    ["cuda:0", torch.device("cuda", 1), 0],
    ids=str,
)
def test_tensors_are_made_and_moved_on_the_cpu(backend, device):
    source = torch.arange(6.0)
    made = [
        torch.empty(3, device=device),
        torch.tensor([1, 2], device=device),
        torch.zeros_like(source, device=device),
        source.new_zeros(3, device=device),
        source.to(device, torch.bfloat16),
        source.to(device=device, dtype=torch.float64),
        torch.empty(3, pin_memory=True),
        source.pin_memory(),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert source.to(device) is source
    assert source.to(torch.float64).dtype == torch.float64  # a dtype is no device
    assert source.to(source.double()).dtype == torch.float64
    source.record_stream(torch.cuda.current_stream())


def test_modules_move_and_meta_stays_meta(backend):
    with torch.device("meta"):
        layer = torch.nn.Linear(2, 2)
    assert layer.weight.device.type == "meta"
    assert layer.to_empty(device="cuda").weight.device.type == "cpu"
    assert layer.cuda() is layer
    with torch.device("cuda"):
        assert torch.ones(2).device.type == "cpu"


def test_type_speaks_of_cuda_and_still_converts(backend):
    tensor = torch.ones(2).type("torch.cuda.BFloat16Tensor")
    assert tensor.dtype == torch.bfloat16
    assert tensor.type() == "torch.cuda.BFloat16Tensor"
    assert tensor.type(torch.float64).dtype == torch.float64
    assert torch.ones(2, device="meta").type() == "torch.meta.FloatTensor"  # not ours to rename


def test_one_device(backend):
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert torch.cuda.get_device_capability() == (8, 0)
    torch.cuda.nvtx.range_push("nothing")
    torch.cuda.nvtx.range_pop()


def test_memory_is_this_process_rather_than_zero(backend):
    before = torch.cuda.memory_allocated()
    block = torch.ones(16 << 20)  # 64 MiB
    assert torch.cuda.memory_allocated() - before > 32 << 20
    del block
    assert torch.cuda.max_memory_allocated() - before > 32 << 20


def test_tensor_parallel_ranks_draw_different_numbers(backend, monkeypatch):
    """A manual_seed that does nothing gives every tensor-parallel rank the same weights."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draw(seed):
        """Numbers of a fork of the tracker, and those of the outer generator after it."""
        tracker = CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("model-parallel-rng", seed)
        with tracker.fork("model-parallel-rng"):
            drawn = torch.rand(4)
        return [drawn, torch.rand(4)]

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # as in a forked process
    first, again, other = draw(10), draw(10), draw(11)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    torch.cuda.manual_seed(1)  # of the one generator
    assert torch.equal(first[1], torch.rand(4))  # a fork leaves it alone
    assert torch.equal(first[1], other[1])


def test_training_does_not_load_the_compiler():
    """It took a fifth of a rank's start."""
    install = f"from megatron_muon import cpu; cpu.install(force={REALLY_HAS_CUDA})"
    modules = output_of(f"{install}; import sys, megatron.training; print(*sys.modules)").split()
    assert "megatron.training" in modules
    assert "torch._inductor.compile_fx" not in modules


@pytest.fixture
def recorded(monkeypatch):
    """Two ranks' worth of gloo: records what is asked for and sums the tensor with itself."""
    calls = []

    def record(name, act):
        def collective(*args, op=None, group=None, async_op=False, **named):
            calls.append((op, async_op))
            act(*args, *named.values())

        monkeypatch.setattr(dist, name, collective)

    record("all_reduce", lambda tensor: tensor.mul_(2))
    record(REDUCE_SCATTER, lambda output, input: output.copy_(2 * input[: output.numel()]))
    record(ALL_GATHER, lambda output, input: None)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    return calls


def test_megatron_fsdp_gets_finished_collectives(backend, buffers, recorded):
    """Coalesced asynchronous gloo collectives wrote into buckets that Megatron-FSDP had freed."""
    view = buffers.torch.distributed
    with buffers._coalescing_manager(None, async_ops=True) as event:
        work = view.all_gather_into_tensor(
            output_tensor=torch.ones(2), input_tensor=torch.ones(1), async_op=True
        )
        view.all_reduce(torch.ones(1))
        assert len(recorded) == 2  # each ran where it was written, not when the manager closed
    assert work.wait()
    assert event.wait()
    assert [is_async for _, is_async in recorded] == [False, False]
    assert view.ReduceOp is dist.ReduceOp  # all else is torch's


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 6.0),
        (dist.ReduceOp.AVG, 3.0),
        (cpu_megatron.PremulSum(0.5), 3.0),
    ],
)
def test_reductions_that_gloo_lacks(backend, buffers, recorded, op, expected):
    view = buffers.torch.distributed
    tensor, output = torch.full((1,), 3.0), torch.empty(1)
    view.reduce_scatter_tensor(output, tensor.clone(), op=op)
    view.all_reduce(tensor, op=op)
    assert (tensor.item(), output.item()) == (expected, expected)
    assert {reduced_by for reduced_by, _ in recorded} == {dist.ReduceOp.SUM}


def test_the_persistent_checkpoint_worker_is_refused(backend):
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    with pytest.raises(RuntimeError, match="--use-persistent-ckpt-worker does not work on the CPU"):
        AsyncCallsQueue.warmup_persistent_caller(0)


FAULTS = """
import resource, sys
import torch
from megatron_muon.cpu import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**22)  # 16 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
before = faults()
kept = keep_freed_memory()
torch.ones(2**22)
print(kept, before, faults())
"""


def test_large_tensors_come_from_memory_that_was_kept():
    kept, before, after = output_of(FAULTS).split()
    assert kept == "True"
    assert int(before) > 10 * int(after)


def test_the_users_own_setting_stands(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    assert not cpu.keep_freed_memory()
