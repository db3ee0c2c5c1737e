"""What megatron-core itself needs in order to run on the CPU, beside devices and collectives.

Starting without a compiler, and saving in the background without writing what training is changing meanwhile.
Neither touches numerics. Needed with megatron-core 0.19.x.
"""

import importlib
from typing import Any, NoReturn

from megatron_muon.cpu.patching import Patches


def install(patches: Patches) -> None:
    """Lets megatron-core use its wheel's dataset helper, and refuses its persistent checkpoint worker."""
    import megatron.core.datasets.utils as dataset_utils
    from megatron.core.dist_checkpointing.strategies import async_utils

    # 0.19.x runs `make` in the package's folder before training. The wheel holds the compiled helper but no
    # Makefile, so `make` fails and the program ends although there is nothing to build.
    build = dataset_utils.compile_helpers

    def compile_helpers() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            build()

    patches.replace(dataset_utils, "compile_helpers", compile_helpers)
    patches.replace(async_utils.PersistentAsyncCaller, "_get_process", _refuse_worker)


def _refuse_worker(*args: Any, **kwargs: Any) -> NoReturn:
    # The worker is a fresh process, where nothing is installed: it divides by its zero CUDA devices and
    # dies. Were it to live, it would share the optimizer's tensors rather than copies of them: copying to
    # the host, which makes the snapshot on a GPU, hands back the same tensor on the CPU.
    raise RuntimeError(
        "--use-persistent-ckpt-worker does not work on the CPU: leave it out and keep --async-save "
        "--async-strategy mcore, which writes from a forked copy of the process, or drop --async-save."
    )
