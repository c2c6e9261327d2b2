"""Parts of a recorded batch: slots (micro-batches), their parts (stages), and the edges between them."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from volseg.parallel.pipeline.flow.placement import Location
from volseg.parallel.pipeline.flow.statistics import WholeBatchStatistics
from volseg.parallel.pipeline.record.graphs import Lanes, StageGraph

__all__ = ["CountedStatistics", "Edge", "Loan", "Loans", "Output", "Part", "RecordedBatch", "Slot"]


class CountedStatistics(WholeBatchStatistics):
    """Leave ``num_batches_tracked`` to the replay."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__(micro_batches)
        self.counters: list[Tensor] = []
        """Each counter as often as one batch increases it."""

    def counts_batch(self, counter: Tensor) -> bool:
        """Count later; return False."""
        if super().counts_batch(counter):
            self.counters.append(counter)
        return False

    def commit(self) -> None:
        """Update running buffers and counters."""
        super().commit()
        for counter in self.counters:
            counter.add_(1)

    def forget(self) -> None:
        """Clear the statistics in the same memory."""
        self.counters.clear()
        self.blank()


@dataclass(eq=False)
class Edge:
    """Copy of a tensor from its maker to a stage that uses it, and of its gradient back."""

    source: Tensor
    target: Tensor
    returned: Tensor | None = None
    """Gradient of ``target``."""
    landing: Tensor | None = None
    """Where the gradient arrives, beside ``source``."""
    input: int | None = None
    """Which tensor of the call ``source`` is, if any."""


@dataclass(eq=False)
class Loan:
    """A parameter or buffer as seen by the graphs of one stage.

    Parameters are never used themselves: their gradient accumulators may stem from an eager batch on another stream,
    which
    a recording must not touch. On the owner's stage an alias replaces the parameter, elsewhere a copy.
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
    """Where its gradient is written."""
    reaches: frozenset[int] = frozenset()
    """Identities of the leaves that its gradient reaches."""


@dataclass(eq=False)
class Part:
    """One micro-batch on one stage."""

    location: Location
    forward: StageGraph
    edges: list[Edge] = field(default_factory=list)
    """Edges that it receives."""
    sends: list[Edge] = field(default_factory=list)
    """Edges that it sends, and whose gradient it gets."""
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
    """Outputs, flat; an ``Output`` for each tensor."""
    lane: int = 0


@dataclass(eq=False)
class RecordedBatch:
    """All data that a replay needs."""

    slots: list[Slot]
    lanes: Lanes
    statistics: CountedStatistics
    loans: Loans
    """Copied once per batch."""
    gradients: dict[int, Tensor]
    """Sum over the micro-batches of a lane, by the identity of the stand-in."""
