"""Read the rank and address that ``torchrun`` or a SLURM step gives to its processes.

This module reads only the environment and does not import torch: the command line calls it before torch is imported.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

OWN_ATTEMPTS = "VOLSEG_ATTEMPTS"
"""Variable that counts earlier starts of the processes: set by volseg's launcher, and by a process that restarts
itself."""

OWN_LAUNCHER = "VOLSEG_LAUNCHER"
"""Variable with the process id of ``volseg.parallel.launch``, or of the cross-validation that started a fold."""

OF_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", OWN_ATTEMPTS)
"""Variables that mark a process as one rank of a job."""

PORTS = range(10_000, 30_000)
"""Rendezvous ports of SLURM steps: below the ports that Linux assigns to outgoing connections."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Rank and rendezvous address of a process in its job."""

    rank: int
    local_rank: int
    """Rank on this machine; selects the device."""
    world_size: int
    address: str | None
    """Rendezvous address; None if the launcher gave none."""
    port: int | None
    has_store: bool = False
    """Whether the launcher runs the store at that address; else rank 0 does."""
    run: str = ""
    """Name that the launcher gives to the job."""
    restarts: int = 0
    """How often this launcher has restarted its processes; a launcher on another machine may have another count."""


def read_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return the launch that the environment describes; None for a process without a launcher.

    SLURM's variables are used only inside a step of several tasks (``srun volseg train``), not in the shell of a batch
    script, which has some of them. torchrun's variables take precedence: torchrun may run inside a SLURM step.

    Parameters
    ----------
    environment
        Variables to read; by default those of this process.

    Examples
    --------
    >>> read_launch({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).rank
    1
    >>> read_launch({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None
    True
    """
    known = os.environ if environment is None else environment
    if "LOCAL_RANK" in known and "WORLD_SIZE" in known:
        port = known.get("MASTER_PORT")
        return Launch(
            rank=int(known.get("RANK", "0")),
            local_rank=int(known["LOCAL_RANK"]),
            world_size=int(known["WORLD_SIZE"]),
            address=known.get("MASTER_ADDR"),
            port=int(port) if port else None,
            has_store=known.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run=known.get("TORCHELASTIC_RUN_ID", ""),
            restarts=int(known.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(known.get(OWN_ATTEMPTS, "0")),
        )
    needed = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    if any(name not in known for name in needed) or int(known["SLURM_STEP_NUM_TASKS"]) < 2:
        return None
    job, step = int(known["SLURM_JOB_ID"]), known.get("SLURM_STEP_ID", "0")
    return Launch(
        rank=int(known["SLURM_PROCID"]),
        local_rank=int(known["SLURM_LOCALID"]),
        world_size=int(known["SLURM_STEP_NUM_TASKS"]),
        address=known.get("MASTER_ADDR") or find_first_node(known["SLURM_STEP_NODELIST"]),
        # Two jobs on one machine, or two steps of a job, need different ports.
        port=int(known.get("MASTER_PORT") or PORTS[(7 * job + int(step)) % len(PORTS)]),
        run=f"slurm {job}.{step}",
        restarts=int(known.get("SLURM_RESTART_COUNT", "0")) + int(known.get(OWN_ATTEMPTS, "0")),
    )


def find_first_node(written: str) -> str:
    """Return the first name of a SLURM node list.

    Examples
    --------
    >>> find_first_node("node[01-03,07],gpu5")
    'node01'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", written)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else written
