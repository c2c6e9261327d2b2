"""What a recorded batch is made of: slots (micro-batches), their parts (stages), and the edges between them."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from volseg.parallel.pipeline.flow.placement import Location
from volseg.parallel.pipeline.flow.statistics import WholeBatchStatistics
from volseg.parallel.pipeline.record.graphs import Lanes, StageGraph

__all__ = ["CountedStatistics", "Edge", "Loan", "Loans", "Output", "Part", "RecordedBatch", "Slot"]


class CountedStatistics(WholeBatchStatistics):
    """Leaves ``num_batches_tracked`` to the replay."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__(micro_batches)
        self.counters: list[Tensor] = []
        """Each as often as one batch increases it."""

    def counts_batch(self, counter: Tensor) -> bool:
        """Remember; never now."""
        if super().counts_batch(counter):
            self.counters.append(counter)
        return False

    def commit(self) -> None:
        """Update running buffers and counters."""
        super().commit()
        for counter in self.counters:
            counter.add_(1)

    def forget(self) -> None:
        """Begin anew in the same memory."""
        self.counters.clear()
        self.blank()


@dataclass(eq=False)
class Edge:
    """A tensor's way from where it is made to a stage that uses it, and its gradient's way back."""

    source: Tensor
    target: Tensor
    returned: Tensor | None = None
    """Gradient of ``target``."""
    landing: Tensor | None = None
    """Where it arrives, beside ``source``."""
    input: int | None = None
    """Which tensor of the call ``source`` is, if any."""


@dataclass(eq=False)
class Loan:
    """A parameter or buffer as the graphs of one stage see it.

    Parameters are never used themselves: their gradient accumulators may date from an eager batch on another
    stream, which a recording must not touch. On the owner's stage an alias stands in, elsewhere a copy.
    """

    state: Tensor
    leaf: Tensor
    is_copy: bool


Loans: TypeAlias = dict[tuple[int, int, int, bool], Loan]
"""By the identity of the state, the stage, the lane, and whether a gradient is wanted."""


@dataclass(eq=False)
class Output:
    """A tensor that ``forward`` returned for one micro-batch."""

    source: Tensor
    landing: Tensor | None = None
    """Where its gradient is put."""
    reaches: frozenset[int] = frozenset()
    """Identities of the leaves that its gradient reaches."""


@dataclass(eq=False)
class Part:
    """One micro-batch on one stage."""

    location: Location
    forward: StageGraph
    edges: list[Edge] = field(default_factory=list)
    """What it receives."""
    sends: list[Edge] = field(default_factory=list)
    """What it sends and gets a gradient for."""
    leaves: dict[int, Tensor] = field(default_factory=dict)
    """Stand-ins for the parameters that it uses, by identity."""
    backward: StageGraph | None = None


@dataclass(eq=False)
class Slot:
    """One micro-batch: its inputs, its parts in order, its outputs."""

    inputs: list[Tensor]
    parts: list[Part]
    outputs: list[Output]
    structure: Any
    leaves: list[Any]
    """What was returned, flat; an ``Output`` for each tensor."""
    lane: int = 0


@dataclass(eq=False)
class RecordedBatch:
    """Everything that a replay needs."""

    slots: list[Slot]
    lanes: Lanes
    statistics: CountedStatistics
    loans: Loans
    """Copies are made once per batch."""
    gradients: dict[int, Tensor]
    """Sum over the micro-batches of a lane, by the identity of the stand-in."""
