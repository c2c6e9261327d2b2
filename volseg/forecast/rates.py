"""From kernels to seconds: a table of measured kernels, read at the nearest shapes.

For each kernel a lower bound is known, its roofline: what the matrix units need at their best, or the memory. The table
says how far from it measured kernels of a family were, as curves from the bound to what came, one per shape::

    measured        . '            curves of two shapes, and between them, by distance, that of a third
       |        . '  _ -
       |    . '  _ -               before the first and behind the last point a curve goes on as the family does
       +------------------ bound

So a curve goes through its points, more work is never faster, and no network enters it. Of kernels that compute, shapes
come near to the roofline in very different degrees: how high the others' curves lie says nothing of one, but how steep
those of the nearest shapes are does. Passes over memory are alike, whatever their shape: all points are one curve.

References
----------
.. [1] Williams, Waterman, Patterson: Roofline. Communications of the ACM 52, 2009, doi:10.1145/1498765.1498785.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import dist, exp, log
from typing import Any

import torch

from volseg.errors import ConfigError
from volseg.forecast.kernel_class import FULL, HALF, ON_CORES, KernelClass, classify
from volseg.forecast.trace import KernelRun

__all__ = ["Curve", "Family", "Peaks", "RateTable", "read_run"]

Measured = Mapping[tuple[float, ...], Sequence[tuple[int, int, float]]]
"""By shape: flops, bytes and seconds."""

NOTHING = 1e-12
"""The bound of a kernel that neither computes nor moves anything, in seconds."""

NEARNESS = 4
"""Weights fall with this power of the distance between shapes."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What a GPU can do at best."""

    bandwidth: float
    """Bytes of its memory per second."""
    half: float
    """Multiplications and additions per second in 16 bits, by matrix units."""
    full: float
    """The same in float32: by matrix units in TF32, where it has these."""
    cores: float | None = None
    """The same in float32 by CUDA's cores; where that is not known an eighth of ``full``, as Ampere has it."""

    @property
    def by_cores(self) -> float:
        """Operations per second without matrix units."""
        return self.full / 8 if self.cores is None else self.cores

    def bound(self, kernel: KernelClass) -> float:
        """Return the roofline's seconds."""
        matrices = self.half if kernel.dtype == HALF else self.full
        return max(kernel.flops / (self.by_cores if kernel.on_cores else matrices), kernel.bytes_moved / self.bandwidth)


@dataclass(frozen=True)
class Curve:
    """Measured seconds over the roofline's, of kernels of one shape."""

    points: tuple[tuple[float, float], ...]
    """Rising in both."""

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> "Curve":
        """Return the curve through points, of which none is faster than one with less work.

        Noise that says otherwise is averaged out (pool adjacent violators, on logarithms).
        """
        blocks: list[tuple[list[float], float]] = []
        for bound, seconds in sorted(points):
            blocks.append(([bound], log(seconds)))
            while len(blocks) > 1 and blocks[-2][1] >= blocks[-1][1]:
                (some, one), (more, other) = blocks[-2:]
                total = len(some) + len(more)
                blocks[-2:] = [([*some, *more], (one * len(some) + other * len(more)) / total)]
        return cls(tuple((bound, exp(value)) for bounds, value in blocks for bound in sorted(set(bounds))))

    def at(self, bound: float) -> float | None:
        """Return seconds between two points, None outside of them."""
        bounds = [point[0] for point in self.points]
        if not bounds[0] <= bound <= bounds[-1]:
            return None
        if bound == bounds[-1]:
            return self.points[-1][1]
        (low, one), (high, other) = self.points[(index := bisect_right(bounds, bound)) - 1 : index + 1]
        share = log(bound / low) / log(high / low)
        return exp(log(one) * (1 - share) + log(other) * share)


class Family:
    """The curves of one function by shape.

    Parameters
    ----------
    measured
        By shape, the roofline's seconds and those that came.
    computes
        Whether its kernels compute, or pass over memory alone.
    """

    def __init__(
        self, measured: Mapping[tuple[float, ...], Sequence[tuple[float, float]]], computes: bool = True
    ) -> None:
        self._computes = computes
        self.curves = {shape: Curve.through(points) for shape, points in measured.items()}
        self.together = Curve.through(point for points in measured.values() for point in points)
        self._bounds = sorted({bound for curve in self.curves.values() for bound, _ in curve.points})
        self._growths: dict[tuple[float, ...], list[float]] = {}

    def seconds(self, shape: tuple[float, ...], bound: float) -> float:
        """Return the seconds of a kernel of a shape, whose roofline is ``bound``."""
        weights = {known: self._weigh(known, shape) for known in self.curves}
        if shape in weights:
            weights = {shape: 1.0}
        total = sum(weights.values())
        return exp(sum(w * log(self._follow(known, bound)) for known, w in weights.items()) / total)

    @staticmethod
    def _weigh(known: tuple[float, ...], shape: tuple[float, ...]) -> float:
        if len(known) != len(shape):
            return 1e-12
        return 1 / max(dist(known, shape), 1e-6) ** NEARNESS

    def _follow(self, shape: tuple[float, ...], bound: float) -> float:
        """Return the seconds on the curve of a shape, which goes on beside the family's."""
        curve = self.curves[shape]
        inside = curve.at(bound)
        if inside is not None:
            return inside
        end, seconds = curve.points[0] if bound < curve.points[0][0] else curve.points[-1]
        return seconds * exp(self._grow(shape, bound) - self._grow(shape, end))

    def _grow(self, shape: tuple[float, ...], bound: float) -> float:
        """Return by how much the seconds of a shape have grown, as logarithm, since the family's first point.

        They are constant before that, and proportional to the bound behind the last one.
        """
        if shape not in self._growths:
            self._growths[shape] = list(accumulate(self._list_growths(shape), initial=0.0))
        grown, bounds = self._growths[shape], self._bounds
        if bound <= bounds[0]:
            return 0.0
        if bound >= bounds[-1]:
            return grown[-1] + log(bound / bounds[-1])
        low, high = bounds[(index := bisect_right(bounds, bound)) - 1 : index + 1]
        share = log(bound / low) / log(high / low)
        return grown[index - 1] * (1 - share) + grown[index] * share

    def _list_growths(self, shape: tuple[float, ...]) -> Iterator[float]:
        """Return how much seconds of a shape grow from each of the family's points to the next, as logarithms.

        That is the mean over the curves there, the nearest shapes counting most. Where there is none, and of passes
        over memory, all points of the family say it together.
        """
        weights = {known: self._weigh(known, shape) for known in self.curves}
        for low, high in pairwise(self._bounds):
            ends = {known: (curve.at(low), curve.at(high)) for known, curve in self.curves.items()}
            there = {known: log(end / start) for known, (start, end) in ends.items() if start and end}
            if there and self._computes:
                total = sum(weights[known] for known in there)
                yield sum(weights[known] * growth for known, growth in there.items()) / total
            else:
                start, end = self.together.at(low), self.together.at(high)
                assert start is not None
                assert end is not None
                yield log(end / start)


class RateTable:
    """Measured kernels of one GPU.

    Parameters
    ----------
    families
        By name and shape: lists of flops, bytes and seconds.
    peaks
        Of the GPU that was measured.
    processors
        Its multiprocessors.
    gap
        Seconds of a kernel that does nothing, in a recording.
    """

    def __init__(self, families: Mapping[str, Measured], peaks: Peaks, processors: int, gap: float) -> None:
        self.peaks, self.processors, self.gap = peaks, processors, gap
        self._families = {
            name: Family(
                {
                    shape: [(self._bound(name, *point[:2]), point[2]) for point in points]
                    for shape, points in at.items()
                },
                computes=any(flops for points in at.values() for flops, _, _ in points),
            )
            for name, at in families.items()
        }

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]], peaks: Peaks, processors: int, gap: float) -> "RateTable":
        """Return the table of rows as ``calibration.kernels`` measures them."""
        found: dict[str, dict[tuple[float, ...], list[tuple[int, int, float]]]] = {}
        for row in rows:
            run = read_run(row)
            kinds = classify(run)
            if len(kinds) == 1:  # of an operator that does several things it is not known what each took
                (kind,) = kinds
                point = kind.flops, kind.bytes_moved, float(row["seconds"])
                for name in (kind.family, *(name_pools(kind) if joins_pool(run, kind) else ())):
                    shape = kind.shape if name == kind.family else ()
                    found.setdefault(name, {}).setdefault(shape, []).append(point)
        return cls(found, peaks, processors, gap)

    def _bound(self, family: str, flops: int, moved: int) -> float:
        dtype = HALF if HALF in family else FULL
        return self.peaks.bound(KernelClass(family, (), flops, moved, dtype, on_cores=ON_CORES in family))

    def knows(self, kernel: KernelClass) -> bool:
        """Say whether kernels of this family were measured."""
        return kernel.family in self._families

    def seconds(self, kernel: KernelClass, peaks: Peaks | None = None, processors: int | None = None) -> float:
        """Return the seconds of a kernel.

        Parameters
        ----------
        kernel
            What runs. One that was never measured takes as long as others that move as much, or compute as much.
        peaks, processors
            Of another GPU than the measured one: it comes as near to its own bound as the measured one did with as much
            work for each multiprocessor.
        """
        family = self._find(kernel)
        bound = max(self.peaks.bound(kernel), NOTHING)
        if peaks is None or processors is None:
            return max(self.gap, family.seconds(kernel.shape, bound))
        if kernel.least_bytes:
            # A multiprocessor of another GPU is about as fast where it is alone: none has the memory to itself.
            own = kernel.least_bytes / peaks.bandwidth
            return max(self.gap + own, family.seconds(kernel.shape, bound))
        alike = bound * self.processors / processors
        beyond = max(0.0, family.seconds(kernel.shape, alike) - self.gap)
        return self.gap + beyond * peaks.bound(kernel) / alike

    def _find(self, kernel: KernelClass) -> Family:
        for name in (kernel.family, *name_relatives(kernel.family), *name_pools(kernel)):
            if name in self._families:
                return self._families[name]
        raise ConfigError(
            f"no rate is known for {kernel.family}, nor for anything like it: the table holds {len(self._families)} "
            "families; measure this machine anew with volseg plan --calibrate"
        )


def name_relatives(family: str) -> Iterable[str]:
    """Return the same function in the other layout, and in the other type."""
    swaps = (("channels last", "contiguous"), ("contiguous", "channels last"))
    others = [family.replace(*swap) for swap in swaps if swap[0] in family] or [family]
    types = (HALF, FULL) if HALF in family else (FULL, HALF)
    return [name.replace(*types) if changed else name for changed in (False, True) for name in (*others, family)]


PLAIN = ("add", "add_", "mul", "clone", "copy_", "relu", "leaky_relu", "leaky_relu_backward", "threshold_backward")
"""Passes that stand for those that were never measured: each thread reads and writes its own numbers."""


def name_pools(kernel: KernelClass) -> tuple[str, ...]:
    """Return what stands for a kernel that was never measured: all that compute, or plain passes over memory."""
    return (f"any product, {kernel.dtype}",) if kernel.flops else (f"any pass, {kernel.dtype}",)


def joins_pool(run: KernelRun, kernel: KernelClass) -> bool:
    """Say whether a measured kernel stands for others."""
    return bool(kernel.flops and not kernel.on_cores) or run.name.removeprefix("aten.") in PLAIN


def read_run(row: Mapping[str, Any]) -> KernelRun:
    """Return what a row of a table speaks of."""
    return KernelRun(
        row["name"],
        getattr(torch, row["dtype"]),
        row["flops"],
        row["bytes_moved"],
        tuple(tuple(shape) for shape in row["shapes"]),
        row["channels_last"],
    )
