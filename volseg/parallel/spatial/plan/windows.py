"""Map output planes to the input planes that they need: the one map of every operator that reads neighbours.

A ``Window`` describes an operator along one axis. ``need(a, b)`` are the input planes that output planes ``a`` to
``b`` read. The span may reach outside the volume: there the operator sees padding. Running the operator *without*
padding on exactly these planes yields output planes from ``first(a, b)`` on, at least up to ``b``.

References
----------
.. [1] V. Dumoulin, F. Visin, "A guide to convolution arithmetic for deep learning", arXiv:1603.07285.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor

from volseg.parallel.spatial.plan.shards import Span, spans


@dataclass(frozen=True, slots=True)
class Window:
    """An operator along one axis; see the module."""

    def need(self, start: int, stop: int) -> Span:
        """Return the input planes read by output planes ``start`` to ``stop``."""
        raise NotImplementedError

    def first(self, start: int, stop: int) -> int:
        """Return the number of the first output plane that is computed from ``need(start, stop)``."""
        del stop
        return start


@dataclass(frozen=True, slots=True)
class Convolution(Window):
    """Convolution or pooling; ``before`` is the padding in front."""

    kernel: int
    stride: int = 1
    before: int = 0
    dilation: int = 1

    def need(self, start: int, stop: int) -> Span:
        """Return the input planes read by output planes ``start`` to ``stop``."""
        reach = (self.kernel - 1) * self.dilation + 1
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + reach

    def outputs(self, size: int, after: int, ceil_mode: bool = False) -> int:
        """Return the number of output planes for ``size`` input planes and ``after`` planes of padding behind."""
        room = size + self.before + after - (self.kernel - 1) * self.dilation - 1
        count = (ceil(room / self.stride) if ceil_mode else room // self.stride) + 1
        # With ceil_mode the last window must start inside the volume or its front padding (torch's rule).
        if ceil_mode and (count - 1) * self.stride >= size + self.before:
            count -= 1
        return count


@dataclass(frozen=True, slots=True)
class TransposedConvolution(Window):
    """Transposed convolution: input plane ``i`` writes output planes ``i * stride - padding + t * dilation``."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def need(self, start: int, stop: int) -> Span:
        """Return the input planes that write output planes ``start`` to ``stop``, and at least one."""
        reach = (self.kernel - 1) * self.dilation
        low = ceil((start + self.padding - reach) / self.stride)
        high = floor((stop - 1 + self.padding) / self.stride)
        # With a stride longer than the kernel no input plane writes some output planes (bias only). Planes are added
        # until the local result spans them all.
        while low * self.stride - self.padding > start:
            low -= 1
        while high * self.stride - self.padding + reach < stop - 1:
            high += 1
        return low, high + 1

    def first(self, start: int, stop: int) -> int:
        """Return the first output plane written by ``need(start, stop)``."""
        return self.need(start, stop)[0] * self.stride - self.padding

    def outputs(self, size: int, output_padding: int) -> int:
        """Return the number of output planes for ``size`` input planes."""
        reach = (self.kernel - 1) * self.dilation
        return (size - 1) * self.stride - 2 * self.padding + reach + output_padding + 1


@dataclass(frozen=True, slots=True)
class Strided(Window):
    """Every ``step``-th plane from ``offset`` on; ``step`` is -1 for a mirrored axis. Padding is a negative offset."""

    offset: int = 0
    step: int = 1

    def need(self, start: int, stop: int) -> Span:
        """Return the span that holds the chosen planes."""
        one, other = self.offset + start * self.step, self.offset + (stop - 1) * self.step
        return min(one, other), max(one, other) + 1


@dataclass(frozen=True, slots=True)
class Resize(Window):
    """Linear interpolation of ``size`` planes to ``outputs``.

    ``scale`` is the user's ``scale_factor`` if torch computes coordinates from it, otherwise None for the ratio of the
    sizes. Coordinates follow torch's ``area_pixel_compute_source_index``.
    """

    size: int
    outputs: int
    scale: float | None = None
    align_corners: bool = False

    def source(self, plane: int) -> tuple[int, int, float]:
        """Return the two input planes that an output plane blends and the weight of the second."""
        if self.align_corners:
            position = plane * (self.size - 1) / (self.outputs - 1) if self.outputs > 1 else 0.0
        else:
            step = 1.0 / self.scale if self.scale else self.size / self.outputs
            position = max((plane + 0.5) * step - 0.5, 0.0)
        low = min(int(position), self.size - 1)
        return low, min(low + 1, self.size - 1), min(max(position - low, 0.0), 1.0)

    def need(self, start: int, stop: int) -> Span:
        """Return the planes between the first and the last one that is read."""
        return self.source(start)[0], self.source(stop - 1)[1] + 1


@dataclass(frozen=True, slots=True)
class ChosenPlanes(Window):
    """Output plane ``i`` is input plane ``planes[i]``: nearest planes, and padding with planes of the volume."""

    planes: tuple[int, ...]

    def source(self, plane: int) -> tuple[int, int, float]:
        """Return the input plane, as ``Resize`` does."""
        return self.planes[plane], self.planes[plane], 0.0

    def need(self, start: int, stop: int) -> Span:
        """Return the planes between the first and the last one that is read."""
        chosen = self.planes[start:stop]
        return min(chosen), max(chosen) + 1


def nearest_planes(size: int, outputs: int, mode: str, scale: float | None) -> tuple[int, ...] | None:
    """Return the input plane of every output plane; None where torch's rounding decides which one it is.

    No rounding occurs if one size is a power of two times the other.

    Parameters
    ----------
    size, outputs
        Planes before and after.
    mode
        ``"nearest"`` or ``"nearest-exact"``.
    scale
        The user's ``scale_factor``, or None if a size was given.
    """
    times, rest = divmod(max(size, outputs), min(size, outputs))
    if rest or times & (times - 1) or scale not in (None, outputs / size):
        return None
    half = int(mode == "nearest-exact")
    return tuple((2 * plane + half) * size // (2 * outputs) for plane in range(outputs))


@lru_cache(maxsize=1024)
def plan_halo(size: int, num_shards: int, window: Window, outputs: int) -> tuple[tuple[int, int], ...] | None:
    """Return the planes that each shard needs before and behind its slab, or None for more complex needs.

    These are a shard that needs less than its slab, or planes beyond its direct neighbour. The first computed plane may
    be in front of the first output plane, as for a transposed convolution.
    """
    result = []
    owned = spans(size, num_shards)
    for index, (own, output) in enumerate(zip(owned, spans(outputs, num_shards), strict=True)):
        if output[0] == output[1]:
            return None
        need = window.need(*output)
        before, behind = own[0] - need[0], need[1] - own[1]
        if before < 0 or behind < 0:
            return None
        if index > 0 and before > owned[index - 1][1] - owned[index - 1][0]:
            return None
        if index < num_shards - 1 and behind > owned[index + 1][1] - owned[index + 1][0]:
            return None
        result.append((before, behind))
    return tuple(result)
