"""Partition of layers into stages, with its costs and bounds: printable, without modules and devices.

References
----------
.. [1] Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
   arXiv:1811.06965, section 2.2: the fill of a pipeline of p stages and m micro-batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Cost for one micro-batch of an indivisible run of module calls."""

    modules: tuple[str, ...]
    """Dotted paths, in the order of the calls."""
    forward_ms: float
    backward_ms: float = 0.0
    parameter_bytes: int = 0
    sent_bytes: int = 0
    """Bytes made here and used by later layers."""

    @property
    def ms(self) -> float:
        """Time of forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Layers, device and activation memory of one stage."""

    device: str
    layers: tuple[LayerCost, ...]
    activation_bytes: float
    """Bytes held from forward to backward, per micro-batch."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Dotted paths of the module calls of this stage, in order."""
        return tuple(path for layer in self.layers for path in layer.modules)

    @property
    def ms(self) -> float:
        """Forward and backward time of one micro-batch."""
        return sum(layer.ms for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of this stage."""
        return sum(layer.parameter_bytes for layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Partition of layers into stages, with costs and bounds. ``print`` it.

    Examples
    --------
    >>> layers = [LayerCost(modules=(name,), forward_ms=ms) for name, ms in [("down", 2), ("up", 6), ("head", 1)]]
    >>> partition = Partition.from_lengths(layers, [1, 2], ["cpu", "cpu"], held=[0, 0], samples=2)
    >>> partition.slowest_ms, round(partition.bound(micro_batches=8), 2)
    (7.0, 1.14)
    """

    stages: tuple[StageCost, ...]
    samples: int
    """Samples of the measured micro-batch."""
    notes: tuple[str, ...] = ()
    """Notes on idle devices."""
    predicted_ms: Mapping[int, float] = field(default_factory=dict)
    """Predicted time of a batch, by each number of stages that fits into the devices' memory; empty if not measured."""

    @classmethod
    def from_lengths(
        cls,
        layers: Sequence[LayerCost],
        lengths: Sequence[int],
        devices: Sequence[object],
        held: Sequence[float],
        **more: Any,
    ) -> "Partition":
        """Group layers into consecutive stages.

        Parameters
        ----------
        layers, lengths
            All layers, and the number of layers per stage.
        devices
            Devices of the stages.
        held
            Bytes of activations that each stage holds.
        more
            The other attributes.
        """
        ends = [0, *accumulate(lengths)]
        stages = [
            StageCost(device=str(device), layers=tuple(layers[start:end]), activation_bytes=num_bytes)
            for device, num_bytes, (start, end) in zip(devices, held, pairwise(ends), strict=False)
        ]
        return cls(stages=tuple(stages), **more)

    @property
    def batch_ms(self) -> float:
        """Predicted time of the batch for which the network was cut; infinite if memory may not suffice."""
        return self.predicted_ms.get(len(self.stages), math.inf)

    @property
    def total_ms(self) -> float:
        """Time of all layers for one micro-batch."""
        return sum(stage.ms for stage in self.stages)

    @property
    def slowest_ms(self) -> float:
        """Time of the slowest stage for one micro-batch."""
        return max(stage.ms for stage in self.stages)

    def bound(self, micro_batches: int) -> float:
        """Return the largest gain over one device: ``m T / ((m + p - 1) max stage)``.

        p stages, m micro-batches; T is the time of all layers for one micro-batch.
        """
        slots = micro_batches + len(self.stages) - 1
        return micro_batches * self.total_ms / (slots * self.slowest_ms) if self.slowest_ms else 1.0

    def __str__(self) -> str:
        rows = [("stage", "device", "forward ms", "backward ms", "parameters MiB", "activations MiB", "modules")]
        for number, stage in enumerate(self.stages):
            paths = stage.modules
            span = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} calls)"
            memory = (f"{stage.parameter_bytes / MIB:.2f}", f"{stage.activation_bytes / MIB:.2f}")
            phases = ("forward_ms", "backward_ms")
            forward, backward = (f"{sum(getattr(layer, name) for layer in stage.layers):.3f}" for name in phases)
            rows.append((str(number), stage.device, forward, backward, *memory, span))
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
        ]
        summary = f"costs not measured (cut by hand); {self.samples} samples per micro-batch"
        if self.total_ms:
            summary = (
                f"one micro-batch of {self.samples}: {self.total_ms:.3f} ms in all, slowest stage "
                f"{self.slowest_ms:.3f} ms; at most {self.total_ms / self.slowest_ms:.2f}x of one device for any "
                "number of micro-batches"
            )
        return "\n".join([*lines, summary, *self.notes])
