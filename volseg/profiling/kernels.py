"""What ran, when and for which layer; what had to be computed and moved there: numbers and names, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "AUGMENTATION",
    "LOSS",
    "MARK",
    "OPTIMIZER",
    "OUTSIDE",
    "TRAVELLING",
    "TRAVELLING_NORMS",
    "PlacedWork",
    "StepPlace",
    "TimedKernel",
    "find_kind",
    "travels",
]

LOSS, OPTIMIZER, AUGMENTATION, OUTSIDE = "(loss)", "(optimizer)", "(augmentation)", "(step)"
"""What is no layer of the network, in the place of a layer's name."""


MARK = "volseg: "
"""Begin of the names of ranges in a trace that say where a step is."""


class StepPlace(NamedTuple):
    """For what a kernel runs."""

    layer: str
    """Dotted name of the module in the plain network, or one of the names in brackets."""
    direction: str
    """``forward``, ``backward``, ``recompute``, ``optimizer``, ``augmentation``, ``communication`` or ``other``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernel:
    """A kernel, or on a CPU an operator, that ran."""

    name: str
    place: StepPlace
    start: float
    """In seconds, from anywhere."""
    seconds: float
    device: int = 0
    stream: int = 0

    @property
    def end(self) -> float:
        """When it was done."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWork:
    """What had to be done somewhere, and what a device needs for that at best."""

    name: str
    place: StepPlace
    kind: str
    flops: int
    """Multiplications and additions of matrix units, two for each multiply-add; of passes over memory none."""
    bytes_moved: int
    """Read and written, each tensor once."""
    byte_bound: float | None = None
    """Seconds that the memory needs; None of a device of unknown speed."""
    flop_bound: float | None = None
    """Seconds that the matrix units need."""
    bound: float | None = None
    """The longer of the two, kernel by kernel."""
    forecast: float | None = None
    """Seconds by the table of measured kernels."""
    device: int = 0


TRAVELLING = (
    *("nccl", "c10d::", "gloo", "memcpy ptop", "memcpy peer"),
    *("_exchange_planes", "_exchange_values", "_send_kernel", "_receive_kernel"),
)
"""Parts of the names of what carries data between devices, in small letters."""

TRAVELLING_NORMS = ("_exchange_coefficients", "_exchange_backward")
"""Kernels that norms have on one device too; among several they wait for each other's sums."""


def travels(name: str, *, alone: bool = True) -> bool:
    """Say whether a kernel carries data between devices, or waits for such.

    Parameters
    ----------
    name
        Of the kernel.
    alone
        Whether no other device computes the same layers.

    Examples
    --------
    >>> [travels(name) for name in ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "_send_kernel", "_affine_kernel")]
    [True, True, False]
    >>> [travels("_exchange_coefficients_kernel", alone=alone) for alone in (True, False)]
    [False, True]
    """
    small = name.lower()
    return any(part in small for part in (TRAVELLING if alone else TRAVELLING + TRAVELLING_NORMS))


KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("convolution", ("conv", "fprop", "dgrad", "wgrad", "implicit_gemm", "taps", "one_voxel", "depthwise", "winograd")),
    ("product", ("gemm", "aten.mm", "::mm", "addmm", "bmm", "matmul", "attention", "cutlass", "linear")),
    ("norm", ("norm", "moments", "_affine_kernel", "_direct_", "coefficients", "_input_kernel", "welford")),
    ("optimizer", ("adam", "sgd", "multi_tensor_apply", "_foreach", "fused_")),
    ("loss", ("dice", "cross_entropy", "nll_loss", "softmax")),
    ("resampling", ("upsample", "_double_kernel", "interpolate", "grid_sample", "pool")),
    ("copy", ("copy", "memcpy", "memset", "clone", "cat", "fill", "zero", "pad", "nchw", "nhwc", "transpose")),
    ("reduction", ("sum", "mean", "reduce", "max", "min")),
)
"""Kinds of kernels, by parts of their names in small letters; the first that fits."""


def find_kind(name: str, known: Mapping[str, str] | None = None) -> str:
    """Return what kind of kernel has a name, of torch, cuDNN or ours.

    Parameters
    ----------
    name
        As a profiler tells it, or of an operator.
    known
        Kinds by names that say too little of themselves.

    Examples
    --------
    >>> [find_kind(name) for name in ("sm90_xmma_fprop_implicit_gemm", "aten.native_batch_norm", "aten.add")]
    ['convolution', 'norm', 'pointwise']
    >>> find_kind("ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    'communication'
    """
    if travels(name):
        return "communication"
    if known is not None and name in known:
        return known[name]
    small = name.lower()
    return next((kind for kind, parts in KINDS if any(part in small for part in parts)), "pointwise")
