"""A run of one process, which needs no torchrun: sets what torchrun would have set."""

from __future__ import annotations

from collections.abc import MutableMapping

from megatron_muon.errors import UserError

_FROM_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where srun and mpirun say how many processes they have started."""


def settle_one_process(environ: MutableMapping[str, str]) -> str | None:
    """Make the environment that of a run of one process, unless it is already that of a launched rank.

    Args:
        environ: the environment, which is changed.

    Returns:
        A note for the user where the environment was changed.

    Raises:
        UserError: half of what a launcher sets is there, or another launcher than torchrun has started several
            processes, each of which would train alone.
    """
    missing = [name for name in _FROM_TORCHRUN if name not in environ]
    if not missing:
        return None
    if "RANK" in environ or "WORLD_SIZE" in environ:
        raise UserError(
            f"the environment has {'RANK' if 'RANK' in environ else 'WORLD_SIZE'} and lacks {', '.join(missing)}; "
            "start with torchrun, which sets all of them, or type: unset RANK WORLD_SIZE, for a run of one process"
        )
    for name in _TASKS:
        if environ.get(name, "1") != "1":
            raise UserError(
                f"{name}={environ[name]}: each of these processes would train alone; start one torchrun on each machine"
            )
    # The address is this machine, whatever a batch script has exported; the store takes a free port for 0.
    environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return "one process; for more: torchrun --nproc-per-node N"
