"""Estimate the seconds of a kernel: a roofline per class of kernels, calibrated by a table of measured kernels.

The roofline [1]_ of a kernel is a lower bound: its time at the peak of the matrix units, or of the memory. The table
tells how many times as long measured kernels of the same family took. A kernel that is not in the table is scaled from
the nearest one by shape and by work, on logarithms.

A family is a function in one layout and one type of numbers, such as forward convolutions without strides, in half
precision with channels last. Within a family, kernels of one shape (channels in and out, taps) form a curve over the
size of the volume. The same function classifies a row of the table and a ``KernelRun`` of a trace, from shapes only.

References
----------
.. [1] Williams, Waterman, Patterson: Roofline. Communications of the ACM 52, 2009, doi:10.1145/1498765.1498785.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import dist, exp, log, log2, prod
from typing import Any, NamedTuple

import torch

from volseg.errors import ConfigError
from volseg.estimate.trace import KernelRun

HALF, FULL = "half", "float32"
"""Types of numbers that differ in speed."""

TURNED_ROUND = ", turned round"
"""Suffix for a transposed convolution of stride 1: a convolution, requested as the gradient of its flipped form."""

LAID_OUT_ANEW = ", laid out anew"
"""Suffix for a copy that changes the layout of the channels."""

STRIDED = ", strided"
"""Suffix for a copy or an addition whose tensors differ in memory order, in the rows of the table."""

CONVOLUTION, BACKWARD = "aten.convolution", "aten.convolution_backward"

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")

GROUP_NORM = "aten.native_group_norm"

BY_PROCESSOR = (
    "aten.native_batch_norm",
    "aten.native_batch_norm_backward",
    GROUP_NORM,
    "aten.native_group_norm_backward",
)
"""Torch's norms that give each channel, or group, to one multiprocessor if channels are not last: two channels take as
long as a hundred."""

PROCESSORS = 132
"""Multiprocessors of the GPU whose table is in the package."""

COUNTED_BY_TAPS = ("few_taps", "many_taps", "few_in", "few_out")
"""Kernels of volseg whose speed is that of a matrix product, not of memory."""

ON_CORES = "depthwise"
"""Kernels of volseg that multiply voxel by voxel, which matrix units cannot: the CUDA cores limit large ones."""


ATTENTION = {"attention": 2, "attention_query": 3, "attention_key": 4, "attention_term": 2}
"""Attention kernels of volseg, with the number of matrix products over all scores."""

BESIDE_PRODUCTS = 150
"""Multiplications and additions for the rest of a score. The rest is about 20 instructions in float32 (terms,
exponential, sums, addresses), in whose time the matrix units do 600 operations. Unmeasured kernels are estimated from
matrix products, which reach a quarter of that. Counted, not measured."""


class KernelClass(NamedTuple):
    """A family, a shape within it, and the operations and bytes of a kernel."""

    family: str
    shape: tuple[float, ...]
    """Logarithms to base 2, so a doubling of channels is the same distance at any number of channels."""
    flops: int
    bytes_moved: int
    dtype: str
    least_bytes: int = 0
    """Bytes really moved by a kernel that uses few multiprocessors; ``bytes_moved`` is then what the memory could have
    moved in the same time."""
    on_cores: bool = False
    """Whether the CUDA cores compute the kernel, in float32, instead of the matrix units."""


def name_dtype(dtype: torch.dtype) -> str:
    """Return ``half`` for both 16-bit types, which matrix units treat equally, and ``float32`` for all other types."""
    return HALF if dtype in (torch.float16, torch.bfloat16) else FULL


def classify(run: KernelRun) -> list[KernelClass]:
    """Return the class of a kernel, or of each kernel of an operator that runs several."""
    dtype = name_dtype(run.dtype)
    where = f"{dtype}, {'channels last' if run.channels_last else 'contiguous'}"
    if run.name.startswith(CONVOLUTION) and len(run.shapes) >= 3:
        return _classify_convolution(run, dtype, where)
    if run.name in PRODUCTS and len(run.shapes) >= 3:
        inner, out = run.shapes[-3][-1], run.shapes[-1]  # a bias may come first
        inner_and_columns = log2(max(1, inner)), log2(max(1, out[-1] if out else 1))
        return [KernelClass(f"product, {dtype}", inner_and_columns, run.flops, run.bytes_moved, dtype)]
    if any(part in run.name for part in COUNTED_BY_TAPS):
        return [_classify_taps(run, dtype)]
    if "attention_kernels." in run.name:
        return [_classify_attention(run, dtype)]
    if ON_CORES in run.name:
        flops, shape = _count_depthwise(run.shapes), _describe_pass(run.shapes)
        return [KernelClass(f"{run.name}, {where}", shape, flops, run.bytes_moved, dtype, on_cores=True)]
    name = "layout" if run.name.endswith(LAID_OUT_ANEW) else run.name.removesuffix(STRIDED)
    family = f"{name}, {where}"
    if run.name in BY_PROCESSOR and not run.channels_last:
        moved = run.bytes_moved * PROCESSORS // _count_busy(run)
        return [KernelClass(family, (), 0, moved, dtype, run.bytes_moved)]
    return [KernelClass(family, _describe_pass(run.shapes), 0, run.bytes_moved, dtype)]


def _count_busy(run: KernelRun) -> int:
    """Return the average number of busy multiprocessors of a norm: each works on one channel or group at a time."""
    volume = next((shape for shape in run.shapes if len(shape) >= 3), (1, 1))
    # An instance norm runs as a batch norm of one sample, with the samples' channels side by side.
    works = volume[1] if "batch" in run.name else volume[0] * volume[1]
    if run.name == GROUP_NORM:
        # A group norm returns means of shape (samples, groups); without them, 8 groups are usual in this field.
        groups = next((shape for shape in run.shapes if len(shape) == 2), (volume[0], min(8, volume[1])))
        works = prod(groups)
    works = max(1, works)
    waves = -(-works // PROCESSORS)
    return max(1, works // waves)


def _describe_pass(shapes: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return the channels of the first tensor: norms and sums split their work by channels."""
    if not shapes or not shapes[0]:
        return ()
    first = shapes[0]
    return (log2(max(1, first[1] if len(first) >= 3 else first[-1])),)


def _classify_convolution(run: KernelRun, dtype: str, where: str) -> list[KernelClass]:
    if not run.name.startswith(BACKWARD):
        slab, weight, out = run.shapes[0], run.shapes[1], run.shapes[-1]
        way = "turned round" if run.name != CONVOLUTION else _name_geometry(slab, out)
        shape = _describe_convolution(slab, weight, out)
        return [KernelClass(f"convolution forward {way}, {where}", shape, run.flops, run.bytes_moved, dtype)]
    gradient, slab, weight, *found = run.shapes
    way, shape = _name_geometry(slab, gradient), _describe_convolution(slab, weight, gradient)
    parts = [name for name, wanted in (("input", slab), ("weight", weight)) if wanted in found]
    parts = parts or ["input", "weight"]
    # Each gradient reads two tensors and writes the third.
    moved = run.dtype.itemsize * (prod(gradient) + prod(slab) + prod(weight))
    return [
        KernelClass(f"convolution {part} gradient {way}, {where}", shape, run.flops // len(parts), moved, dtype)
        for part in parts
    ]


def _name_geometry(slab: Sequence[int], out: Sequence[int]) -> str:
    before, after = prod(slab[2:]), prod(out[2:])
    # The planes that an unpadded slab loses at a cut are not a stride.
    if before < 2 * after and after < 2 * before:
        return "as wide"
    return "to finer" if after > before else "to coarser"


def _describe_convolution(slab: Sequence[int], weight: Sequence[int], out: Sequence[int]) -> tuple[float, ...]:
    return log2(slab[1]), log2(out[1]), log2(max(1, prod(weight[2:])))


def _classify_attention(run: KernelRun, dtype: str) -> KernelClass:
    """Return the class of an attention kernel that stores no scores; its first tensors are queries and keys."""
    (*outer, rows, features), (*_, columns, _) = run.shapes[:2]
    products = ATTENTION[run.name.rpartition(".")[2].removesuffix("_kernel")]
    flops = prod(outer) * rows * columns * (2 * features * products + BESIDE_PRODUCTS)
    return KernelClass(f"{run.name}, {dtype}", (log2(features),), flops, run.bytes_moved, dtype)


def _classify_taps(run: KernelRun, dtype: str) -> KernelClass:
    """Return the class of one of volseg's kernels that multiplies channels, or taps of few channels, by channels."""
    # The slab and the output (or its gradient) have more voxels than a weight has taps.
    volumes = sorted((shape for shape in run.shapes if len(shape) == 5), key=lambda shape: -prod(shape[2:]))[:2]
    channels = sorted(max(1, shape[1]) for shape in volumes)
    voxels = min(shape[0] * prod(shape[2:]) for shape in volumes)  # of the output: a stride leaves some out
    taps = _count_taps([shape for shape in run.shapes if shape not in volumes], channels)
    flops = 2 * voxels * channels[0] * channels[-1] * taps
    shape = log2(channels[0]), log2(channels[-1]), log2(taps)
    return KernelClass(f"{run.name}, {dtype}", shape, flops, run.bytes_moved, dtype)


def _count_depthwise(shapes: Sequence[Sequence[int]]) -> int:
    """Return the operations of a depthwise convolution or its gradient: all taps per voxel of the coarser volume.

    >>> _count_depthwise([(1, 32, 8, 8, 8), (343, 32), (1, 32, 8, 8, 8)]) == 2 * 32 * 8**3 * 343
    True
    """
    rows = [shape for shape in shapes if len(shape) == 2]  # taps, channels; else a gradient by parts comes last
    taps, volumes = (rows[0][0], shapes) if rows else (prod(shapes[-1][1:4]), shapes[:-1])
    return 2 * taps * min(prod(shape) for shape in volumes if len(shape) == 5)


def _count_taps(shapes: Sequence[Sequence[int]], channels: Sequence[int]) -> int:
    """Return the taps of a kernel's weight, or of the parts of its gradient, with these channels in and out."""
    weight = shapes[0]
    if len(weight) == 4:  # in the order in which a kernel reads the weight
        return max(1, prod(weight) // prod(channels))
    if len(weight) == 6:  # parts, channels out, three sides, channels in; of voxels of a group, and of a run of taps
        rows, depth, height, runs, wide = weight[1:]
        grouped = rows > channels[-1]
        return depth * height * (runs * wide // channels[0] - rows // channels[-1] + 1 if grouped else runs)
    if len(weight) == 5:
        return prod(weight[2:])
    return max(1, weight[-1] // channels[0])  # of one row per channel: all taps of all channels in


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
