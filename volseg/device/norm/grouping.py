# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Groups of (sample, channel) pairs of a norm that share statistics, and their order in a kernel."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from volseg.device.triton_kernels import tl, triton

LANES = 8
"""Groups that a program joins side by side."""

MOST_LANES = 64
"""Channels of one group that a program joins side by side."""

THREADS = 128
"""Threads of a program."""

TILE = 1024
"""Statistics of parts that a program reads at a time."""


class PairBlocks(NamedTuple):
    """Distribution of the pairs over programs: each takes a few groups at a time, or all pairs of one group.

    Over a batch, groups are side by side in memory (``across`` False): a program takes some, many samples at a time. A
    group of channels is one piece (``across`` True): a program takes one, a number of channels at a time.
    """

    groups: int
    members: int
    """Pairs of a group."""
    across: bool
    block: int
    """Pairs that a program takes at a time."""

    @property
    def blocks(self) -> int:
        """Number of programs."""
        return self.groups if self.across else int(triton.cdiv(self.groups, self.block))

    @property
    def steps(self) -> int:
        """Number of steps in which a program takes the pairs of its one group."""
        return int(triton.cdiv(self.members, self.block)) if self.across else 1

    @property
    def rows(self) -> int:
        """Samples that a program of several groups takes at a time."""
        return max(1, THREADS // self.block)


@dataclass(frozen=True, slots=True)
class Grouping:
    """All samples of a channel share their statistics (batch norm), or ``groups`` of channels of a sample do."""

    over_batch: bool = False
    groups: int | None = None

    def is_alone(self, batch: int, channels: int) -> bool:
        """Return whether each pair is its own group."""
        return batch == 1 if self.over_batch else self.groups in (None, channels)

    def average(self, pairs: Tensor) -> Tensor:
        """Replace each entry of ``(B, C)`` by the mean of its group."""
        if self.over_batch:
            return pairs.mean(0, keepdim=True).expand_as(pairs)
        if self.groups is None:
            return pairs
        split = pairs.unflatten(1, (self.groups, -1))
        return split.mean(-1, keepdim=True).expand_as(split).flatten(1)

    def compute_lanes(self, batch: int, channels: int) -> PairBlocks:
        """Return how programs take the pairs of a number of samples and channels."""
        if self.is_alone(batch, channels):
            return PairBlocks(batch * channels, 1, False, LANES)
        if self.over_batch:
            return PairBlocks(channels, batch, False, LANES)
        assert self.groups is not None
        members = channels // self.groups
        return PairBlocks(batch * self.groups, members, True, min(MOST_LANES, triton.next_power_of_2(members)))


ALONE = Grouping()


@triton.jit
def compute_pairs(step, groups, members, ACROSS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the pairs that a program takes in a step, and a mask of existing ones: see ``PairBlocks``."""
    lane = tl.arange(0, BLOCK)
    if ACROSS:
        channel = step * BLOCK + lane
        i = tl.program_id(0) * members + channel
        inside = channel < members
    else:
        group = tl.program_id(0) * BLOCK + lane
        i = step * groups + group
        inside = group < groups
    return i, inside


@triton.jit
def compute_samples(first, groups, members, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the pairs of a program's groups in some samples, ``[ROWS, BLOCK]``, with a mask: over a batch."""
    sample = first + tl.arange(0, ROWS)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return sample[:, None] * groups + group[None, :], (sample < members)[:, None] & (group < groups)[None, :]


@triton.jit
def compute_slots(groups, ACROSS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of a program's groups, a mask of the lanes that send for one, and of those that receive."""
    lane = tl.arange(0, BLOCK)
    if ACROSS:
        slot = tl.program_id(0) + 0 * lane
        speaks = lane == 0
        listens = lane >= 0
    else:
        slot = tl.program_id(0) * BLOCK + lane
        speaks = slot < groups
        listens = speaks
    return slot, speaks, listens


@triton.jit
def join_lanes(values, ACROSS: tl.constexpr):
    """Return the sums over the members in the lanes, on all of them."""
    if ACROSS:
        values = tl.broadcast_to(tl.sum(values, 0), values.shape)
    return values
