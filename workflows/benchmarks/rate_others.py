"""Matrix products, a transformer's windows, and optimizers."""

from collections.abc import Iterator
from functools import partial
from math import prod

import torch
from rate_cases import Prepared, RateCase, count_run, draw
from torch import Tensor

from volseg.device.torch_internals import (
    softmax,
)

__all__ = ["list_others", "prepare_optimizers", "prepare_product", "prepare_tokens"]

aten = torch.ops.aten

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
    lists = {"weights": weights, "gradients": gradients, "momenta": momenta, "seconds": seconds}
    every = [tensor for tensors in lists.values() for tensor in tensors]
    three = [*weights, *gradients, *momenta]
    kind = torch.float32
    return [
        (
            count_run("aten._foreach_add_", kind, [*weights, *gradients]),
            lambda: torch._foreach_add_(weights, gradients, alpha=-1e-6),
        ),
        (
            count_run("aten._foreach_mul_", kind, momenta),
            lambda: torch._foreach_mul_(momenta, 0.999),
        ),
        (count_run("aten._foreach_norm", kind, gradients), lambda: torch._foreach_norm(gradients)),
        (
            count_run("aten._fused_adamw_", kind, every),
            lambda: _step_adam(weights, gradients, momenta, seconds, steps),
        ),
        (
            count_run("aten._fused_sgd_", kind, three),
            lambda: _step_sgd(weights, gradients, momenta),
        ),
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
