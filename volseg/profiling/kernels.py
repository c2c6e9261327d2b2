"""Define the records of a profile: kernels with their times and layers, and their work. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

LOSS, OPTIMIZER, AUGMENTATION, OUTSIDE = "(loss)", "(optimizer)", "(augmentation)", "(step)"
"""Names in place of a layer's, for work outside of the network's layers."""


MARK = "volseg: "
"""Prefix of the names of ranges in a trace that mark the place of a step."""


class StepPlace(NamedTuple):
    """The layer and direction that a kernel runs for."""

    layer: str
    """Dotted name of the module in the plain network, or one of the names in brackets."""
    direction: str
    """``forward``, ``backward``, ``recompute``, ``optimizer``, ``augmentation``, ``communication`` or ``other``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernel:
    """A kernel that ran; on a CPU an operator."""

    name: str
    place: StepPlace
    start: float
    """Seconds from an arbitrary origin."""
    seconds: float
    device: int = 0
    stream: int = 0

    @property
    def end(self) -> float:
        """End of the kernel, in the same seconds as ``start``."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWork:
    """Work at a place of a step, and the least time that a device needs for it."""

    name: str
    place: StepPlace
    kind: str
    flops: int
    """Floating-point operations of matrix units, two per multiply-add; 0 for passes over memory."""
    bytes_moved: int
    """Bytes read and written, each tensor once."""
    byte_bound: float | None = None
    """Seconds that the memory needs; None for a device of unknown speed."""
    flop_bound: float | None = None
    """Seconds that the matrix units need."""
    bound: float | None = None
    """The longer of the two bounds, kernel by kernel."""
    forecast: float | None = None
    """Seconds, estimated from the table of measured kernels."""
    device: int = 0


TRAVELLING = (
    *("nccl", "c10d::", "gloo", "memcpy ptop", "memcpy peer"),
    *("_exchange_planes", "_exchange_values", "_send_kernel", "_receive_kernel"),
)
"""Parts of the names of kernels that carry data between devices, in lower case."""

TRAVELLING_NORMS = ("_exchange_coefficients", "_exchange_backward")
"""Kernels of norms on any number of devices; on several they wait for each other's sums."""


def travels(name: str, *, alone: bool = True) -> bool:
    """Return whether a kernel carries data between devices, or waits for data.

    Parameters
    ----------
    name
        Of the kernel.
    alone
        Whether this device is the only one that computes these layers.

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
"""Kinds of kernels, by parts of their names in lower case; the first match counts."""


def find_kind(name: str, known: Mapping[str, str] | None = None) -> str:
    """Return the kind of a kernel of torch, cuDNN or volseg, from its name.

    Parameters
    ----------
    name
        Name in the profiler's output, or name of an operator.
    known
        Kinds of kernels whose names do not show their kind.

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
