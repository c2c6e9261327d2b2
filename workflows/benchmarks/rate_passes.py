"""Timed calls, each with its ``KernelRun``: passes over volumes, matrix products, transformer windows, optimizers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from volseg.device.norm import passes, statistics
from volseg.device.norm.activation import Activation, Term
from volseg.device.torch_internals import softmax
from volseg.estimate.trace import KernelRun

Prepared = tuple[KernelRun, Callable[[], object]]
"""What is counted, and the call that does it."""


@dataclass(frozen=True)
class RateCase:
    """Calls on one set of tensors."""

    name: str
    size: int
    """Bytes of its tensors, about."""
    prepare: Callable[[torch.device], list[Prepared]]
    """Makes the tensors."""


Layout = tuple[torch.dtype, bool]
"""Type of the tensors, and whether channels are last."""

LAYOUTS: tuple[Layout, ...] = (
    (torch.bfloat16, True),
    (torch.bfloat16, False),
    (torch.float32, False),
    (torch.float32, True),
    (torch.float16, True),
    (torch.float16, False),
)


def draw(device: torch.device, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return noise: zeros would let matrix units run at a higher clock."""
    layout = torch.channels_last_3d if channels_last and len(shape) == 5 else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=layout).normal_()


def count_run(
    name: str, dtype: torch.dtype, tensors: Sequence[Tensor], channels_last: bool = False, flops: int = 0
) -> KernelRun:
    """Return what a trace would hold of a kernel that reads or writes each tensor once."""
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return KernelRun(name, dtype, flops, moved, shapes, channels_last)


def name_layout(layout: Layout) -> str:
    """Return the layout in words."""
    dtype, last = layout
    return f"{str(dtype).removeprefix('torch.')}, {'channels last' if last else 'contiguous'}"


VOLUMES = ((32, 128), (32, 64), (128, 32), (256, 16), (256, 8), (2, 128))
"""Channels and side of what norms and passes over memory are timed on."""


BATCHES, SAMPLES = ((16, 64), (64, 32), (256, 8)), 16
"""Channels and side of norms over several samples, which a norm over batches does not share out further."""


@dataclass(frozen=True)
class _Pair:
    x: Tensor
    y: Tensor

    @cached_property
    def coarse(self) -> Tensor:
        """Every second voxel of ``x`` along each axis."""
        layout = torch.channels_last_3d if _is_last(self.x) else torch.contiguous_format
        return self.x[:, :, ::2, ::2, ::2].contiguous(memory_format=layout)

    @property
    def sides(self) -> list[int]:
        return list(self.x.shape[2:])

    @property
    def slopes(self) -> Tensor:
        return self.x.new_ones(1, self.x.shape[1], 1, 1, 1)

    @property
    def other(self) -> torch.dtype:
        """The type to which ``x`` is converted."""
        return torch.float32 if self.x.dtype is torch.bfloat16 else torch.bfloat16


Build = Callable[[_Pair], tuple[Sequence[Tensor], Callable[[], object]]]
"""From two tensors of one shape to all that is read and written once, and the call."""

aten = torch.ops.aten
TWOS, ZEROS, ONES = [2] * 3, [0] * 3, [1] * 3


PASSES: dict[str, Build] = {
    "aten.clone": lambda v: ((v.x, v.y), lambda: aten.clone(v.x)),
    "aten.copy_": lambda v: ((v.x, v.y), lambda: v.y.copy_(v.x)),
    "aten.fill_": lambda v: ((v.x,), lambda: v.x.fill_(0.5)),
    "aten.zero_": lambda v: ((v.x,), lambda: v.x.zero_()),
    "aten.add": lambda v: ((v.x, v.y, v.x), lambda: aten.add(v.x, v.y)),
    "aten.add_": lambda v: ((v.x, v.y), lambda: aten.add_(v.x, v.y)),
    "aten.mul": lambda v: ((v.x, v.y, v.x), lambda: aten.mul(v.x, v.y)),
    "aten._to_copy": lambda v: ((v.x, v.x.to(v.other)), lambda: v.x.to(v.other)),
    "aten.leaky_relu": lambda v: ((v.x, v.y), lambda: aten.leaky_relu(v.x, 0.01)),
    "aten.leaky_relu_backward": lambda v: ((v.x, v.y, v.x), lambda: aten.leaky_relu_backward(v.x, v.y, 0.01, False)),
    "aten.relu": lambda v: ((v.x, v.y), lambda: aten.relu(v.x)),
    "aten.threshold_backward": lambda v: ((v.x, v.y, v.x), lambda: aten.threshold_backward(v.x, v.y, 0)),
    "aten.elu": lambda v: ((v.x, v.y), lambda: aten.elu(v.x)),
    "aten.elu_backward": lambda v: ((v.x, v.y, v.x), lambda: aten.elu_backward(v.x, 1.0, 1.0, 1.0, False, v.y)),
    "aten.gelu": lambda v: ((v.x, v.y), lambda: aten.gelu(v.x)),
    "aten.gelu_backward": lambda v: ((v.x, v.y, v.x), lambda: aten.gelu_backward(v.x, v.y)),
    "aten._prelu_kernel": lambda v: ((v.x, v.y), lambda: aten._prelu_kernel(v.x, v.slopes)),
    "aten._prelu_kernel_backward": lambda v: (
        (v.x, v.y, v.x, v.y),
        lambda: aten._prelu_kernel_backward(v.x, v.y, v.slopes),
    ),
    "aten.native_dropout": lambda v: ((v.x, v.y), lambda: aten.native_dropout(v.x, 0.5, True)),
    "aten.cat": lambda v: ((v.x, v.y, v.x, v.y), lambda: torch.cat((v.x, v.y), 1)),
    "aten.sum": lambda v: ((v.x,), lambda: v.x.sum((0, 2, 3, 4))),
    "aten.mean": lambda v: ((v.x,), lambda: v.x.mean()),
    "aten._softmax": lambda v: ((v.x, v.y), lambda: softmax(v.x, 1, False)),
    "aten._softmax_backward_data": lambda v: (
        (v.x, v.y, v.x),
        lambda: aten._softmax_backward_data.default(v.x, v.y, 1, v.x.dtype),
    ),
    "aten._log_softmax": lambda v: ((v.x, v.y), lambda: aten._log_softmax(v.x, 1, False)),
    "aten._log_softmax_backward_data": lambda v: (
        (v.x, v.y, v.x),
        lambda: aten._log_softmax_backward_data(v.x, v.y, 1, v.x.dtype),
    ),
    "layout": lambda v: ((v.x, v.y), lambda: _turn(v.x)),
    "aten.avg_pool3d": lambda v: ((v.x, v.coarse), lambda: aten.avg_pool3d(v.x, TWOS, TWOS)),
    "aten.avg_pool3d_backward": lambda v: (
        (v.x, v.coarse),
        lambda: aten.avg_pool3d_backward(v.coarse, v.x, TWOS, TWOS, ZEROS, False, True, None),
    ),
    "aten.max_pool3d_with_indices": lambda v: ((v.x, v.coarse), lambda: aten.max_pool3d_with_indices(v.x, TWOS, TWOS)),
    "aten.max_pool3d_with_indices_backward": lambda v: _pool_backward(v.x),
    "aten.upsample_nearest3d": lambda v: ((v.coarse, v.x), lambda: aten.upsample_nearest3d(v.coarse, v.sides)),
    "aten.upsample_nearest3d_backward": lambda v: (
        (v.x, v.coarse),
        lambda: aten.upsample_nearest3d_backward(v.x, v.sides, list(v.coarse.shape)),
    ),
    "aten.upsample_trilinear3d": lambda v: (
        (v.coarse, v.x),
        lambda: aten.upsample_trilinear3d(v.coarse, v.sides, False),
    ),
    "aten.upsample_trilinear3d_backward": lambda v: (
        (v.x, v.coarse),
        lambda: aten.upsample_trilinear3d_backward(v.x, v.sides, list(v.coarse.shape), False),
    ),
    "aten.native_batch_norm": lambda v: ((v.x, v.y), lambda: _batch_norm(v.x)),
    "aten.native_batch_norm_backward": lambda v: ((v.x, v.y, v.x), _batch_norm_backward(v.x, v.y)),
    "aten.native_group_norm": lambda v: ((v.x, v.y), lambda: _group_norm(v.x)),
    "aten.native_group_norm_backward": lambda v: ((v.x, v.y, v.x), _group_norm_backward(v.x, v.y)),
}
"""Operators that read and write volumes, by torch's names; ``layout`` turns channels to the other layout."""


def _is_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last_3d)


def _turn(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.contiguous_format if _is_last(x) else torch.channels_last_3d)


def _pool_backward(x: Tensor) -> tuple[Sequence[Tensor], Callable[[], object]]:
    out, indices = aten.max_pool3d_with_indices(x, TWOS, TWOS)
    call = aten.max_pool3d_with_indices_backward
    return (out, indices, x), lambda: call(out, x, TWOS, TWOS, ZEROS, ONES, False, indices)


def _batch_norm(x: Tensor) -> Any:
    """Return the norm by whom torch chooses, cuDNN or itself, and what backward needs."""
    weight = torch.ones(x.shape[1], device=x.device)
    return torch._batch_norm_impl_index(x, weight, weight, None, None, True, 0.1, 1e-5, True)


def _batch_norm_backward(x: Tensor, y: Tensor) -> Callable[[], object]:
    weight = torch.ones(x.shape[1], device=x.device)
    _, mean, rstd, reserved, number = _batch_norm(x)
    return lambda: aten._batch_norm_impl_index_backward.default(
        number, x, y, weight, None, None, mean, rstd, True, 1e-5, [True] * 3, reserved
    )


def _group_norm(x: Tensor) -> Any:
    groups = min(8, x.shape[1])
    return aten.native_group_norm(x, None, None, len(x), x.shape[1], x[0, 0].numel(), groups, 1e-5)


def _group_norm_backward(x: Tensor, y: Tensor) -> Callable[[], object]:
    groups = min(8, x.shape[1])
    _, mean, rstd = _group_norm(x)
    call, voxels = aten.native_group_norm_backward, x[0, 0].numel()
    weight = torch.ones(x.shape[1], device=x.device, dtype=x.dtype)
    return lambda: call(y, x, mean, rstd, weight, len(x), x.shape[1], voxels, groups, [True] * 3)


def _our_passes(x: Tensor, y: Tensor) -> dict[str, tuple[Sequence[Tensor], Callable[[], object]]]:
    """Return our norms' kernels, each with what it reads and writes."""
    scale, shift, mean = (torch.rand(1, x.shape[1], device=x.device) for _ in range(3))
    norm = Term(x, mean, scale, shift, Activation("leaky", 0.01))
    return {
        "norm.statistics._moments_kernel": ((x,), lambda: statistics.moments(x)),
        "norm.passes._affine_kernel": ((x, y), lambda: passes.affine(norm)),
        "norm.passes._sums_kernel": ((x, y), lambda: passes.gradient_sums(y, norm)),
        "norm.passes._input_kernel": ((x, y, x), lambda: passes.gradient_input(y, norm, mean, shift)),
    }


def prepare_passes(
    names: Sequence[str], channels: int, side: int, layout: Layout, ours: bool, device: torch.device, samples: int = 1
) -> list[Prepared]:
    """Return passes by their names, or ours, over volumes of so many channels and so wide."""
    dtype, last = layout
    x, y = (draw(device, (samples, channels, *[side] * 3), dtype, last) for _ in range(2))
    prepared: list[Prepared] = []
    if ours:
        for name, (tensors, call) in _our_passes(x, y).items():
            prepared.append((count_run(name, dtype, tensors, last), call))
        return prepared
    for name in names:
        tensors, call = PASSES[name](_Pair(x, y))
        prepared.append((count_run(name, dtype, tensors, last), call))
    return prepared


def _prepare_norms(channels: int, side: int, layout: Layout, device: torch.device) -> list[Prepared]:
    names = ["aten.native_batch_norm", "aten.native_batch_norm_backward"]
    if not layout[1]:
        names += ["aten.native_group_norm", "aten.native_group_norm_backward"]
    return prepare_passes(names, channels, side, layout, False, device, SAMPLES)


def list_passes() -> Iterator[RateCase]:
    """List all of them."""
    for channels, side in VOLUMES:
        for dtype, last in LAYOUTS[:4]:
            size = channels * side**3 * dtype.itemsize
            for name in PASSES:
                if last and "group_norm" in name:
                    continue  # its backward takes contiguous volumes only
                told = f"{name} of {channels} x {side}^3, {name_layout((dtype, last))}"
                yield RateCase(told, 4 * size, partial(prepare_passes, (name,), channels, side, (dtype, last), False))
    for channels, side in BATCHES:
        for dtype, last in LAYOUTS[:4]:
            size = SAMPLES * channels * side**3 * dtype.itemsize
            told = f"norms of {SAMPLES} x {channels} x {side}^3, {name_layout((dtype, last))}"
            yield RateCase(told, 4 * size, partial(_prepare_norms, channels, side, (dtype, last)))
    for channels, side in ((32, 128), (32, 64), (128, 32), (256, 16), (256, 8), (16, 128), (16, 64)):
        size = channels * side**3
        told = f"norm of ours, {channels} x {side}^3"
        yield RateCase(told, 8 * size, partial(prepare_passes, (), channels, side, LAYOUTS[0], True))


PRODUCTS = (
    (343 * 343, 48, 144),
    (343 * 343, 48, 192),
    (343 * 343, 192, 48),
    (14 * 14 * 14 * 8, 96, 288),
    (7 * 7 * 7 * 8, 192, 768),
    (7 * 7 * 7, 768, 3072),
    (4096, 4096, 4096),
    (512, 512, 512),
)
"""Rows, inner and columns of matrix products; those of a SwinUNETR first."""


def prepare_product(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[Prepared]:
    """Return a matrix product."""
    rows, inner, columns = sizes
    a, b = draw(device, (rows, inner), dtype, False), draw(device, (inner, columns), dtype, False)
    out = a @ b
    return [(count_run("aten.mm", dtype, (a, b, out), flops=2 * prod(sizes)), lambda: torch.mm(a, b))]


def prepare_tokens(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> list[Prepared]:
    """Return the norm, the attention and the roll of a transformer's windows of 343 tokens."""
    x = draw(device, (rows, width), dtype, False)
    windows, heads = max(1, rows // 343), max(1, width // 16)
    weight = torch.ones(width, device=device, dtype=dtype)
    out, mean, rstd = aten.native_layer_norm(x, [width], weight, weight, 1e-5)
    query, key = (draw(device, (windows * heads, 343, 16), dtype, False) for _ in range(2))
    scores = torch.bmm(query, key.transpose(1, 2))
    norm_backward = aten.native_layer_norm_backward
    work = 2 * windows * heads * 343 * 343 * 16
    return [
        (
            count_run("aten.native_layer_norm", dtype, (x, out)),
            lambda: aten.native_layer_norm(x, [width], weight, weight, 1e-5),
        ),
        (
            count_run("aten.native_layer_norm_backward", dtype, (out, x, x)),
            lambda: norm_backward(out, x, [width], mean, rstd, weight, weight, [True] * 3),
        ),
        (
            count_run("aten.bmm", dtype, (query, key.transpose(1, 2), scores), flops=work),
            lambda: torch.bmm(query, key.transpose(1, 2)),
        ),
        (count_run("aten.bmm", dtype, (scores, key, query), flops=work), lambda: torch.bmm(scores, key)),
        (count_run("aten._softmax", dtype, (scores, scores)), lambda: softmax(scores, -1, False)),
        (
            count_run("aten._softmax_backward_data", dtype, (scores, scores, scores)),
            lambda: torch.ops.aten._softmax_backward_data.default(scores, scores, -1, dtype),
        ),
        (count_run("aten.roll", dtype, (x, x)), lambda: torch.roll(x, 3, 0)),
    ]


def _step_adam(
    weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], seconds: list[Tensor], steps: list[Tensor]
) -> None:
    torch._fused_adamw_(
        weights, gradients, momenta, seconds, [], steps,
        lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=1e-5, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _step_sgd(weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> None:
    torch._fused_sgd_(
        weights, gradients, momenta,
        weight_decay=1e-5, momentum=0.9, lr=1e-3, dampening=0.0, nesterov=True, maximize=False, is_first_step=False,
    )  # fmt: skip


def prepare_optimizers(millions: int, device: torch.device) -> list[Prepared]:
    """Return steps over so many million weights in 60 tensors, as torch's optimizers run them by default."""
    of_each = millions * 1_000_000 // 60
    weights, gradients, momenta, seconds = (
        [draw(device, (of_each,), torch.float32, False).abs_() for _ in range(60)] for _ in range(4)
    )
    steps = [torch.ones((), device=device) for _ in range(60)]
    three = [*weights, *gradients, *momenta]
    kind = torch.float32
    return [
        (
            count_run("aten._foreach_add_", kind, [*weights, *gradients]),
            lambda: torch._foreach_add_(weights, gradients, alpha=-1e-6),
        ),
        (count_run("aten._foreach_mul_", kind, momenta), lambda: torch._foreach_mul_(momenta, 0.999)),
        (count_run("aten._foreach_norm", kind, gradients), lambda: torch._foreach_norm(gradients)),
        (
            count_run("aten._fused_adamw_", kind, [*three, *seconds]),
            lambda: _step_adam(weights, gradients, momenta, seconds, steps),
        ),
        (count_run("aten._fused_sgd_", kind, three), lambda: _step_sgd(weights, gradients, momenta)),
    ]


def list_others() -> Iterator[RateCase]:
    """List all of them."""
    for sizes in PRODUCTS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            size = dtype.itemsize * (sizes[0] * sizes[1] + sizes[1] * sizes[2] + sizes[0] * sizes[2])
            told = f"matrix product {sizes}, {dtype}".replace("torch.", "")
            yield RateCase(told, size, partial(prepare_product, sizes, dtype))
    for rows, width in ((343 * 343, 48), (343 * 64, 96), (343 * 8, 192), (343, 384)):
        for dtype in (torch.bfloat16, torch.float32):
            size = dtype.itemsize * rows * (8 * width + 4 * 343 * (width // 16))
            told = f"tokens {rows} x {width}, {dtype}".replace("torch.", "")
            yield RateCase(told, size, partial(prepare_tokens, rows, width, dtype))
    for millions in (5, 45):
        yield RateCase(
            f"optimizers, {millions} million weights", 16_000_000 * millions, partial(prepare_optimizers, millions)
        )
