"""Estimate the seconds of a kernel: a roofline per class of kernels, calibrated by a table of measured kernels.

The roofline [1]_ of a kernel is a lower bound: its time at the peak of the matrix units, or of the memory. The table
tells how many times as long measured kernels of the same family took. A kernel that is not in the table is scaled from
the nearest one by shape and by work, on logarithms.

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

NOTHING = 1e-12
"""Roofline in seconds of a kernel that neither computes nor moves anything."""

BY_SHAPE, BY_CHANNELS, FAR = 3.0, 0.5, 8.0
"""Distance of a doubling of channels or taps, where a doubling of work is 1: for kernels that compute, and for passes
over memory, whose channels matter little; and the distance between shapes of different length."""

MORE, LESS = 0.95, 0.8
"""Powers of the work by which seconds grow from a measured kernel to a larger one, and fall to a smaller one. Of
several constants tried, these estimated the steps of an H200 best."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak rates of a GPU."""

    bandwidth: float
    """Bytes of memory per second."""
    half: float
    """Multiplications and additions per second of the matrix units in 16 bits."""
    full: float
    """Multiplications and additions per second in float32: of the matrix units in TF32, if the GPU has them."""
    cores: float
    """Multiplications and additions per second of the CUDA cores in float32."""

    def bound(self, kernel: KernelClass) -> float:
        """Return the roofline of a kernel in seconds."""
        matrices = self.half if kernel.dtype == HALF else self.full
        return max(kernel.flops / (self.cores if kernel.on_cores else matrices), kernel.bytes_moved / self.bandwidth)


class RateTable:
    """Measured kernels of one GPU.

    Parameters
    ----------
    rows
        Kernels, as ``workflows/benchmarks/kernel_rates.py`` measures them.
    peaks
        Peak rates of the measured GPU.
    processors
        Number of its multiprocessors.
    gap
        Seconds of an empty kernel in a recording.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], peaks: Peaks, processors: int, gap: float) -> None:
        self.peaks, self.processors, self.gap = peaks, processors, gap
        self._families: dict[str, list[tuple[tuple[float, ...], float, float]]] = {}
        """By family: shape, and logarithms of the roofline and of the measured seconds."""
        for row in rows:
            run = read_run(row)
            kinds = classify(run)
            if len(kinds) == 1:  # the times of an operator's several kernels are unknown
                (kind,) = kinds
                point = log(max(peaks.bound(kind), NOTHING)), log(float(row["seconds"]))
                self._families.setdefault(kind.family, []).append((kind.shape, *point))
                # Products, and plain passes over memory, substitute for unmeasured kernels.
                if (kind.flops and not kind.on_cores) or run.name.removeprefix("aten.") in PLAIN:
                    self._families.setdefault(name_pool(kind), []).append(((), *point))

    def knows(self, kernel: KernelClass) -> bool:
        """Return whether kernels of this family were measured."""
        return kernel.family in self._families

    def seconds(self, kernel: KernelClass, peaks: Peaks | None = None, processors: int | None = None) -> float:
        """Return the seconds of a kernel.

        Parameters
        ----------
        kernel
            The kernel. Without a measured family, it is estimated from other kernels that compute or move as much.
        peaks, processors
            Peak rates and multiprocessors of another GPU. It reaches the same share of its roofline as the measured GPU
            did with as much work per multiprocessor.
        """
        bound = max(self.peaks.bound(kernel), NOTHING)
        if peaks is None or processors is None:
            return max(self.gap, self._interpolate(kernel, bound))
        if kernel.least_bytes:
            # A lone multiprocessor of another GPU is about as fast: one cannot use the memory's full bandwidth.
            own = kernel.least_bytes / peaks.bandwidth
            return max(self.gap + own, self._interpolate(kernel, bound))
        alike = bound * self.processors / processors
        beyond = max(0.0, self._interpolate(kernel, alike) - self.gap)
        return self.gap + beyond * peaks.bound(kernel) / alike

    def _interpolate(self, kernel: KernelClass, bound: float) -> float:
        """Return the seconds of a kernel with roofline ``bound``, scaled from the nearest of its family or pool."""
        names = (kernel.family, *name_relatives(kernel.family), name_pool(kernel))
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
    """Return the families of the same function in the other layout, and in the other type."""
    swaps = (("channels last", "contiguous"), ("contiguous", "channels last"))
    others = [family.replace(*swap) for swap in swaps if swap[0] in family] or [family]
    types = (HALF, FULL) if HALF in family else (FULL, HALF)
    return [name.replace(*types) if changed else name for changed in (False, True) for name in (*others, family)]


PLAIN = ("add", "add_", "mul", "clone", "copy_", "relu", "leaky_relu", "leaky_relu_backward", "threshold_backward")
"""Passes that substitute for unmeasured ones: each thread reads and writes its own elements."""


def name_pool(kernel: KernelClass) -> str:
    """Return the pool that substitutes for an unmeasured kernel: all that compute, or plain passes over memory."""
    return f"any {'product' if kernel.flops else 'pass'}, {kernel.dtype}"


def read_run(row: Mapping[str, Any]) -> KernelRun:
    """Return the kernel of a row of the table."""
    return KernelRun(
        row["name"],
        getattr(torch, row["dtype"]),
        row["flops"],
        row["bytes_moved"],
        tuple(tuple(shape) for shape in row["shapes"]),
        row["channels_last"],
    )
