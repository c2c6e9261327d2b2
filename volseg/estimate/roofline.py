"""From kernels to seconds: a roofline per class of kernels, calibrated by a table of measured ones.

For each kernel a lower bound is known, its roofline [1]_: what the matrix units need at their best, or the memory. The
table says how many times as long measured kernels of its family took. Of a kernel that is not in the table, that factor
is the one of the nearest by shape and by work, on logarithms.

References
----------
.. [1] Williams, Waterman, Patterson: Roofline. Communications of the ACM 52, 2009, doi:10.1145/1498765.1498785.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import dist, exp, log
from typing import Any

import torch

from volseg.errors import ConfigError
from volseg.estimate.kernel_class import FULL, HALF, KernelClass, classify
from volseg.estimate.trace import KernelRun

__all__ = ["Peaks", "RateTable", "read_run"]

NOTHING = 1e-12
"""The bound of a kernel that neither computes nor moves anything, in seconds."""

BY_SHAPE, BY_CHANNELS, FAR = 3.0, 0.5, 8.0
"""What a doubling of channels or taps counts as distance beside one of work: of kernels that compute; and of passes
over memory, which are alike whatever their channels. And the distance between shapes of other kinds."""

MORE, LESS = 0.95, 0.8
"""Powers of the work by which seconds grow from a measured kernel to a larger one, and fall to a smaller one. These
constants are those of several tried by which the steps of an H200 were estimated best."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What a GPU can do at best."""

    bandwidth: float
    """Bytes of its memory per second."""
    half: float
    """Multiplications and additions per second in 16 bits, by matrix units."""
    full: float
    """The same in float32: by matrix units in TF32, where it has these."""
    cores: float
    """The same in float32 by CUDA's cores."""

    def bound(self, kernel: KernelClass) -> float:
        """Return the roofline's seconds."""
        matrices = self.half if kernel.dtype == HALF else self.full
        return max(kernel.flops / (self.cores if kernel.on_cores else matrices), kernel.bytes_moved / self.bandwidth)


class RateTable:
    """Measured kernels of one GPU.

    Parameters
    ----------
    rows
        Kernels, as ``workflows/benchmarks/kernel_rates.py`` measures them.
    peaks
        Of the GPU that was measured.
    processors
        Its multiprocessors.
    gap
        Seconds of a kernel that does nothing, in a recording.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], peaks: Peaks, processors: int, gap: float) -> None:
        self.peaks, self.processors, self.gap = peaks, processors, gap
        self._families: dict[str, list[tuple[tuple[float, ...], float, float]]] = {}
        """By family: shape, and logarithms of the roofline's seconds and of the measured ones."""
        for row in rows:
            run = read_run(row)
            kinds = classify(run)
            if len(kinds) == 1:  # of an operator that does several things it is not known what each took
                (kind,) = kinds
                point = log(max(peaks.bound(kind), NOTHING)), log(float(row["seconds"]))
                self._families.setdefault(kind.family, []).append((kind.shape, *point))
                for pool in name_pools(kind) if joins_pool(run, kind) else ():
                    self._families.setdefault(pool, []).append(((), *point))

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
        bound = max(self.peaks.bound(kernel), NOTHING)
        if peaks is None or processors is None:
            return max(self.gap, self._interpolate(kernel, bound))
        if kernel.least_bytes:
            # A multiprocessor of another GPU is about as fast where it is alone: none has the memory to itself.
            own = kernel.least_bytes / peaks.bandwidth
            return max(self.gap + own, self._interpolate(kernel, bound))
        alike = bound * self.processors / processors
        beyond = max(0.0, self._interpolate(kernel, alike) - self.gap)
        return self.gap + beyond * peaks.bound(kernel) / alike

    def _interpolate(self, kernel: KernelClass, bound: float) -> float:
        """Return the seconds of a kernel whose roofline is ``bound``, by the nearest one of its family or pool."""
        names = (kernel.family, *name_relatives(kernel.family), *name_pools(kernel))
        points = next((self._families[name] for name in names if name in self._families), None)
        if points is None:
            raise ConfigError(
                f"no rate is known for {kernel.family}, nor for anything like it: the table holds "
                f"{len(self._families)} families; measure this machine again with volseg plan --calibrate"
            )
        shape, work = kernel.shape, log(bound)
        of_shape = BY_SHAPE if len(shape) > 1 else BY_CHANNELS
        _, at, took = min(
            (of_shape * (dist(known, shape) if len(known) == len(shape) else FAR) + abs(at - work) / log(2), at, took)
            for known, at, took in points
        )
        return exp(took + (work - at) * (MORE if work > at else LESS))


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
