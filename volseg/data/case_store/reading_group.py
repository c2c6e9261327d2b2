"""Find the processes that read a training's cases, and those that share a machine's memory."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import torch.distributed as dist

from volseg.data.case_store.preprocessed import DamagedCaseError, SharedCases, StoredCase, can_share
from volseg.parallel.processes.progress import exchange
from volseg.parallel.processes.supervision import name_machine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Position of one process among the readers."""

    machine: int
    number: int | None
    """Number among all readers; None for a process that reads nothing."""


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The processes that prepare cases together, from the view of one of them.

    Each reader of a machine reads its share of the training's files, and all of a machine's readers hold all training
    cases, in shared memory. The validation cases are dealt over the readers of all machines.
    """

    group: dist.ProcessGroup | None = None
    """Gloo group for messages; None for a single process."""
    places: Sequence[Place] = (Place(machine=0, number=0),)
    """Place of every process of the group."""
    own: int = 0
    """Number of this process in the group."""

    @property
    def number(self) -> int | None:
        """Number of this process among the readers; None if it reads nothing."""
        return self.places[self.own].number

    @property
    def count(self) -> int:
        """Number of reading processes."""
        return sum(place.number is not None for place in self.places)

    @property
    def local(self) -> list[int]:
        """Numbers in the group of the readers on this machine, in their order."""
        machine = self.places[self.own].machine
        return [
            other for other, place in enumerate(self.places) if place.machine == machine and place.number is not None
        ]

    def rank_of(self, member: int) -> int:
        """Return the rank in the job of one of the group's processes."""
        return member if self.group is None else dist.get_global_rank(self.group, member)


ALONE = Readers()
"""One process that reads everything."""


def meet_readers(group: dist.ProcessGroup | None, *, reads: bool = True) -> Readers:
    """Find the readers and the processes that share memory; all processes of the group call this function.

    Processes share memory if they run on one machine, in one container, and one can open the other's memory, which is
    tried. Processes that cannot share count as separate machines: each reads all cases, and a warning is logged once.

    Parameters
    ----------
    group : ProcessGroup or None
        Gloo group; None for a single process.
    reads : bool
        Whether this process reads; others receive the problems too.
    """
    if group is None:
        return ALONE
    machine = name_machine()
    probe = SharedCases() if reads and can_share() else None
    try:
        token = token_hex(16)
        path = probe.add({}, {"token": token}) if probe else None
        told = exchange([machine, reads, token, path], group)
        mine = [other for other in told if other[0] == machine and other[1]]
        shares = exchange(not reads or all(_is_reached(*other[2:]) for other in mine), group)
    finally:
        if probe is not None:
            probe.close()
    own = dist.get_rank(group)
    apart = {name for (name, *_), shared in zip(told, shares, strict=True) if not shared}
    sizes = Counter(name for name, is_reader, *_ in told if is_reader)
    if own == 0 and any(sizes[name] > 1 for name in apart):
        logger.warning("the processes of a machine cannot share memory here: each reads and keeps all training cases")
    machines: dict[str, int] = {}
    places: list[Place] = []
    for other, (name, is_reader, *_) in enumerate(told):
        key = f"{name} {other}" if name in apart else name
        number = sum(place.number is not None for place in places) if is_reader else None
        places.append(Place(machine=machines.setdefault(key, len(machines)), number=number))
    return Readers(group=group, places=tuple(places), own=own)


def _is_reached(token: str, path: str | None) -> bool:
    """Return whether another reader's memory can be mapped, and is its own."""
    if path is None:
        return False
    try:
        return StoredCase.open(Path(path)).about["token"] == token
    except (OSError, KeyError, DamagedCaseError):  # another user's or container's, or a platform that hides it
        return False
