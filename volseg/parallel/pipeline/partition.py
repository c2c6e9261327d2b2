"""Cut a measured sequence of layers into stages: pure arithmetic, exact, and printable.

A pipeline is as fast as its slowest stage, so the cut minimises the slowest stage (a bottleneck partition, solved
exactly by dynamic programming). Among cuts that are as fast within ``TOLERANCE``, the one whose busiest device holds
the least memory is taken. Nothing here touches a module or a device.

References
----------
.. [1] Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
   arXiv:1811.06965, section 2.2: the fill of a pipeline of p stages and m micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from volseg.errors import PartitionError

__all__ = ["LayerCost", "Partition", "StageCost", "balance", "pipeline_ms", "quickest_split"]

TOLERANCE = 0.05
"""How much slower than the best a stage may be where that evens out memory."""

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """What one indivisible run of module calls costs for one micro-batch."""

    modules: tuple[str, ...]
    """Dotted paths, in the order in which they are called."""
    forward_ms: float
    backward_ms: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    """Kept from forward to backward."""
    sent_bytes: int = 0
    """Made here and used by later layers."""

    @property
    def ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """The layers of one device."""

    device: str
    layers: tuple[LayerCost, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """Dotted paths of the module calls of this stage, in order."""
        return tuple(path for layer in self.layers for path in layer.modules)

    @property
    def ms(self) -> float:
        """Forward and backward of one micro-batch."""
        return sum(layer.ms for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that live here."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Bytes kept from forward to backward, per micro-batch."""
        return sum(layer.activation_bytes for layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Which device runs which layers, what that costs, and what bounds it. ``print`` it.

    Examples
    --------
    >>> layers = [LayerCost(modules=(name,), forward_ms=ms) for name, ms in [("down", 2), ("up", 6), ("head", 1)]]
    >>> partition = Partition.from_lengths(layers, [1, 2], ["cpu", "cpu"], samples=2)
    >>> partition.slowest_ms, round(partition.bound(micro_batches=8), 2)
    (7.0, 1.14)
    >>> partition.heaviest.modules
    ('up',)
    """

    stages: tuple[StageCost, ...]
    samples: int
    """Samples of the micro-batch that was measured."""

    @classmethod
    def from_lengths(
        cls, layers: Sequence[LayerCost], lengths: Sequence[int], devices: Sequence[str], samples: int
    ) -> "Partition":
        """Group ``layers`` into consecutive stages of ``lengths``."""
        ends = [0, *accumulate(lengths)]
        return cls(
            stages=tuple(
                StageCost(device=str(device), layers=tuple(layers[start:end]))
                for device, (start, end) in zip(devices, pairwise(ends), strict=False)
            ),
            samples=samples,
        )

    @property
    def total_ms(self) -> float:
        """All layers, for one micro-batch."""
        return sum(stage.ms for stage in self.stages)

    @property
    def slowest_ms(self) -> float:
        """The slowest stage, for one micro-batch."""
        return max(stage.ms for stage in self.stages)

    @property
    def heaviest(self) -> LayerCost:
        """The layer that no number of devices can divide."""
        return max((layer for stage in self.stages for layer in stage.layers), key=lambda layer: layer.ms)

    def bound(self, micro_batches: int) -> float:
        """Return the largest gain over one device: ``m T / ((m + p - 1) max stage)``.

        p stages, m micro-batches; T is the time of all layers for one micro-batch.
        """
        slots = micro_batches + len(self.stages) - 1
        return micro_batches * self.total_ms / (slots * self.slowest_ms) if self.slowest_ms else 1.0

    def __str__(self) -> str:
        rows = [("stage", "device", "ms", "parameters MiB", "activations MiB", "modules")]
        for number, stage in enumerate(self.stages):
            paths = stage.modules
            span = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} calls)"
            memory = (f"{stage.parameter_bytes / MIB:.2f}", f"{stage.activation_bytes / MIB:.2f}")
            rows.append((str(number), stage.device, f"{stage.ms:.3f}", *memory, span))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
        ]
        return "\n".join([*lines, *self._limits()])

    def _limits(self) -> list[str]:
        """Say which layer bounds time, and which memory."""
        if not self.total_ms:
            return [f"costs not measured (cut by hand); {self.samples} samples per micro-batch"]
        heavy, even = self.heaviest, self.total_ms / len(self.stages)
        lines = [
            f"one micro-batch of {self.samples}: {self.total_ms:.3f} ms in all, slowest stage "
            f"{self.slowest_ms:.3f} ms; "
            f"at most {self.total_ms / self.slowest_ms:.2f}x of one device however many micro-batches"
        ]
        if heavy.ms > even:
            lines.append(
                f"{_name(heavy)} alone takes {heavy.ms / self.total_ms:.0%} of the time: layers cannot bring "
                f"more than "
                f"{self.total_ms / heavy.ms:.2f}x"
            )
        layers = [layer for stage in self.stages for layer in stage.layers]
        fullest = max(layers, key=lambda layer: layer.activation_bytes)
        kept = sum(layer.activation_bytes for layer in layers)
        if fullest.activation_bytes * len(self.stages) > 1.3 * kept:
            lines.append(
                f"{_name(fullest)} alone keeps {fullest.activation_bytes / kept:.0%} of the activations: "
                f"its device holds that share whatever the cut"
            )
        return lines


def _name(layer: LayerCost) -> str:
    return layer.modules[0] if len(layer.modules) == 1 else f"{layer.modules[0]} to {layer.modules[-1]}"


def balance(
    costs: Sequence[float],
    stages: int,
    memory: Sequence[float] | None = None,
    memory_limits: Sequence[float] | None = None,
    tolerance: float = TOLERANCE,
) -> list[int]:
    """Cut layers into consecutive non-empty stages with the least slowest stage.

    Parameters
    ----------
    costs
        Milliseconds per layer, non-negative.
    stages
        Between one and the number of layers.
    memory
        Bytes per layer. Among cuts within ``tolerance`` of the fastest, the least busiest memory wins.
    memory_limits
        Bytes that each stage may hold.
    tolerance
        Relative slack in time.

    Returns
    -------
    list of int
        Layers per stage. O(stages * L**2).

    Raises
    ------
    PartitionError
        If there are fewer layers than stages, or no cut respects the limits.

    Examples
    --------
    >>> balance([3, 1, 1, 1, 2], 2)
    [2, 3]
    """
    if not 1 <= stages <= len(costs):
        raise PartitionError(
            f"cannot split {len(costs)} layers into {stages} non-empty stages; use 1 to {len(costs)} devices"
        )
    limits = [float("inf")] * stages if memory_limits is None else list(memory_limits)
    held = [0.0] * len(costs) if memory is None else list(memory)
    quickest = _bottleneck(costs, [float("inf")] * stages, held, limits)
    if quickest is None:
        least = _bottleneck(held, [float("inf")] * stages, costs, [float("inf")] * stages)
        assert least is not None  # without limits there is always a cut
        peak = max(_sums(held, least))
        raise PartitionError(
            f"no cut into {stages} stages fits: even the most even one needs {peak / 2**30:.3f} GiB on one "
            f"device, and the "
            f"devices have {', '.join(f'{limit / 2**30:.3f}' for limit in limits)} GiB; "
            f"use more devices, a smaller batch or smaller volumes"
        )
    if memory is None:
        return quickest
    slowest = max(_sums(costs, quickest)) * (1 + tolerance)
    even = _bottleneck(held, limits, costs, [slowest] * stages)
    return quickest if even is None else even


def _bottleneck(
    costs: Sequence[float], cost_limits: Sequence[float], other: Sequence[float], other_limits: Sequence[float]
) -> list[int] | None:
    """Minimise the largest stage sum of ``costs`` while both sums of each stage keep to their limits."""
    before, beside = [0.0, *accumulate(costs)], [0.0, *accumulate(other)]
    # Sums of floats taken as differences differ in the last bits from sums taken in order.
    slack = 1 + 1e-9
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * len(costs)]
    for stage, (limit, other_limit) in enumerate(zip(cost_limits, other_limits, strict=True)):
        reached: list[tuple[float, tuple[int, ...]] | None] = [None] * len(best)
        for end in range(stage + 1, len(best)):
            for start in range(stage, end):
                previous, cost = best[start], before[end] - before[start]
                fits = cost <= limit * slack and beside[end] - beside[start] <= other_limit * slack
                if previous is None or not fits:
                    continue
                candidate = (max(previous[0], cost), (*previous[1], end - start))
                known = reached[end]
                if known is None or candidate < known:
                    reached[end] = candidate
        best = reached
    last = best[-1]
    return None if last is None else list(last[1])


def _sums(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    ends = [0, *accumulate(lengths)]
    return [sum(values[start:end]) for start, end in pairwise(ends)]


def pipeline_ms(stage_ms: Sequence[float], micro_batches: int, launch_ms: float = 0.0) -> float:
    """Return the time of ``micro_batches`` equal micro-batches over stages of ``stage_ms``.

    The first flows through all stages, each further one adds the slowest stage, or the time ``launch_ms`` in
    which the host launches one micro-batch where that is longer.

    Examples
    --------
    >>> pipeline_ms([2, 3], micro_batches=4)
    14.0
    """
    return float(sum(stage_ms)) + (micro_batches - 1) * max(*stage_ms, launch_ms)


def quickest_split(candidates: dict[int, float]) -> int:
    """Return the split size of the least predicted time; of equals within 2 %, the largest, which launches least.

    Examples
    --------
    >>> quickest_split({1: 9.0, 2: 5.0, 4: 5.05, 8: 7.0})
    4
    """
    quickest = min(candidates.values())
    return max(size for size, ms in candidates.items() if ms <= quickest * 1.02)
