"""Which processes read a training's cases, and which of them share a machine's memory."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from volseg.data.stored_case import SharedTensors, can_share, map_tensors, view_tensor
from volseg.parallel.processes.progress_sync import exchange
from volseg.parallel.processes.supervision import name_machine

__all__ = ["ALONE", "Place", "Readers", "deal_by_size", "meet_readers"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one process stands among the readers."""

    machine: int
    number: int | None
    """Among all readers; None for a process that reads nothing."""


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The processes that prepare cases together, as one of them sees them.

    Each reader of a machine reads its share of the training's files, and all of a machine's readers hold all training
    cases, in memory that they share. The cases that validate are dealt over the readers of all machines.
    """

    group: dist.ProcessGroup | None = None
    """On gloo, for messages; None: one process alone."""
    places: Sequence[Place] = (Place(machine=0, number=0),)
    """Of every process of the group."""
    own: int = 0
    """This process's number in the group."""

    @property
    def number(self) -> int | None:
        """Its number among the readers; None if it reads nothing."""
        return self.places[self.own].number

    @property
    def count(self) -> int:
        """How many processes read."""
        return sum(place.number is not None for place in self.places)

    @property
    def local(self) -> list[int]:
        """The group's numbers of the readers on this machine, in their order."""
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
    """Find out who reads and who shares memory with whom; all processes of the group call this.

    Processes share memory where they run on one machine, in one container, and one can open the other's memory: that is
    tried. Those that cannot share count as machines of their own: each reads all, and says so once.

    Parameters
    ----------
    group : ProcessGroup or None
        On gloo; None: this process alone.
    reads : bool
        Whether this process reads; one that does not is told of problems all the same.
    """
    if group is None:
        return ALONE
    machine = name_machine()
    probe = SharedTensors() if reads and can_share() else None
    try:
        place = probe.add(torch.tensor([os.getpid()])) if probe else None
        told = exchange([machine, reads, probe and probe.address, place], group)
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


def deal_by_size(sizes: Sequence[int], count: int) -> list[int]:
    """Return who of ``count`` gets each item, so that the sums are even: the largest first, to who has least.

    >>> deal_by_size([5, 3, 3, 1], 2)
    [0, 1, 1, 0]
    """
    loads = [0] * count
    owners = [0] * len(sizes)
    # One more each, so that items without a size are dealt in turn.
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += sizes[item] + 1
    return owners


def _is_reached(address: list[int] | None, place: list | None) -> bool:
    """Say whether another reader's memory can be mapped, and is its own."""
    if address is None or place is None:
        return False
    try:
        mapped = map_tensors(address)
    except OSError:  # another user's, or a platform that hides it
        return False
    return mapped is not None and view_tensor(mapped, place).item() == address[0]
