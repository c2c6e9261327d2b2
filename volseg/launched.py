"""What a launcher tells the processes that it starts: ``torchrun``'s variables, or SLURM's inside of a step.

Reads the environment and nothing else, and needs no torch: the command line asks before torch is imported.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

__all__ = ["OF_JOB", "OWN_ATTEMPTS", "OWN_LAUNCHER", "Launch", "find_launch", "list_nodes"]

OWN_ATTEMPTS = "VOLSEG_ATTEMPTS"
"""Variable in which our own launcher tells how often it has started the processes before, and one that begins anew
how often it has."""

OWN_LAUNCHER = "VOLSEG_LAUNCHER"
"""Variable in which ``volseg.parallel.launch`` tells its process id, and a cross-validation its own to its folds."""

OF_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", OWN_ATTEMPTS)
"""Variables by which a process takes itself for one of a job."""

PORTS = range(10_000, 30_000)
"""Where the processes of a SLURM step meet: below the ports that Linux gives to connections."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of a process in its job."""

    rank: int
    local_rank: int
    """Its number on this machine, which chooses its device."""
    world_size: int
    address: str | None
    """Where the processes meet; None where nobody said."""
    port: int | None
    has_store: bool = False
    """Whether the launcher keeps the store at that address; else the first process does."""
    run: str = ""
    """What the launcher calls the job."""
    restarts: int = 0
    """How often this launcher has started its processes again; the launcher of another machine may count otherwise."""


def find_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return the place that a launcher gave to this process; None where it was started alone.

    SLURM's variables count inside of a step of several tasks (``srun volseg train``) and not in the shell of a batch
    script, which has some of them. Those of torchrun, which may itself run in a step, come first.

    Parameters
    ----------
    environment
        By default that of this process.

    Examples
    --------
    >>> find_launch({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).rank
    1
    >>> find_launch({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None
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
        address=known.get("MASTER_ADDR") or list_nodes(known["SLURM_STEP_NODELIST"])[0],
        # Two jobs on one machine, or two steps of a job, should not meet each other.
        port=int(known.get("MASTER_PORT") or PORTS[(7 * job + int(step)) % len(PORTS)]),
        run=f"slurm {job}.{step}",
        restarts=int(known.get("SLURM_RESTART_COUNT", "0")) + int(known.get(OWN_ATTEMPTS, "0")),
    )


def list_nodes(written: str) -> list[str]:
    """Return the names that SLURM writes as ranges.

    Examples
    --------
    >>> list_nodes("node[01-03,07],gpu5")
    ['node01', 'node02', 'node03', 'node07', 'gpu5']
    """
    names = []
    for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", written):
        parts = re.split(r"\[([^\]]*)\]", group)  # text and ranges alternate
        choices = [_count(part) if index % 2 else [part] for index, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in product(*choices)]
    return names


def _count(ranges: str) -> list[str]:
    """Return the numbers of ``01-03,07``, as wide as they are written."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
