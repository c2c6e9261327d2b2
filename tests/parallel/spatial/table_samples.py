"""Samples for operators that have none in torch's database or ``volume_samples``.

A name with a namespace is one entry; a bare one stands for all of that name. ``FUNCTIONS`` holds the entries that
cannot be compared by calling them: what they return is no value, or differs for reasons of its own. Each calls the
entry, which the comparison checks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from volume_samples import MASK, SHAPE, SLAB, Sample, along, each, given, normal, tied, unit


def alone() -> list[Sample]:
    """Return a volume, and no other argument."""
    return each(given())


def read() -> list[Sample]:
    """Return a volume whose numbers may be read."""
    return [given(normal(*SHAPE).detach())]


def constant() -> list[Sample]:
    """Return a constant volume: only what was drawn differs between its planes."""
    return [given(-torch.ones(2, 3, 6, 6, 6, dtype=torch.float64))]


def pooled(ndim: int) -> Callable[[], list[Sample]]:
    shape = (2, 3, 6, 4)[: ndim + 2]
    return lambda: [given(normal(*shape), *args) for args in ((2,), (3, 1), (1,))]


def normed_pool(ndim: int) -> Callable[[], list[Sample]]:
    return lambda: [given(normal(*SHAPE[: ndim + 2]), 2, size) for size in (2, 1)]


def convolved(ndim: int, transposed: bool = False) -> Callable[[], list[Sample]]:
    shape, channels = (2, 3, 6, 4)[: ndim + 2], (3, 4) if transposed else (4, 3)
    settings: list[dict[str, Any]] = [{}, {"padding": 1}, {"stride": 2}, {"dilation": 2, "padding": 2}]
    return lambda: [
        given(normal(*shape), normal(*channels, *[3] * ndim, seed=2), normal(4, seed=3), **own) for own in settings
    ]


def attended() -> list[Sample]:
    tokens = [normal(6, 2, 4, seed=seed) for seed in (1, 2, 3)]
    weights = (normal(12, 4), normal(12), None, None, False, 0.0, normal(4, 4), normal(4))
    return [given(*tokens, 4, 2, *weights, need_weights=need) for need in (False, True)]


METADATA = [
    *("dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex", "is_signed"),
    *("get_device", "is_contiguous", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn"),
    *("is_mps", "is_xpu", "is_vulkan", "is_nested", "layout", "itemsize", "is_inference", "retains_grad", "output_nr"),
    *("_version", "is_ipu", "is_maia", "is_mtia", "data", "detach", "__dir__", "grad_fn", "__format__", "backward"),
    *("grad", "register_hook", "__iter__", "cpu", "cuda", "requires_grad_", "retain_grad", "detach_"),
]

READ = [
    *("numpy", "__array__", "tolist", "item", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
    *("untyped_storage", "storage", "data_ptr", "__dlpack__", "__dlpack_device__", "share_memory_", "is_shared"),
    *("pin_memory", "is_pinned", "stride", "storage_offset", "msort", "nonzero", "argwhere"),
]

SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    **dict.fromkeys(METADATA, alone),
    **dict.fromkeys(READ, read),
    "size": lambda: each(given(), given(2), given(dim=-1)),
    "is_same_size": lambda: each(given(normal(*SHAPE)), given(normal(*SLAB))),
    "type_as": lambda: each(given(torch.zeros(1)), given(normal(1))),
    "type": lambda: [*each(given(torch.float32)), *read()],
    "to": lambda: each(
        given(torch.float32), given(normal(1)), given("cpu"), given(dtype=torch.int64), given(copy=True)
    ),
    "copy_": lambda: each(given(normal(*SHAPE, seed=2)), given(normal(4)), given(tied(*SHAPE, dtype=torch.int64))),
    "zero_": lambda: each(given()),
    "new_zeros": lambda: each(given((2, 3))),
    "new_ones": lambda: each(given((2, 3))),
    "new_empty": lambda: each(given((2, 3))),
    "new_full": lambda: each(given((2, 3), 1.5)),
    "new_tensor": lambda: each(given([1.0, 2.0])),
    "__contains__": lambda: [given(normal(*SHAPE).detach(), 0.5)],
    "__reduce_ex__": lambda: [given(normal(*SHAPE).detach(), 2)],
    "__deepcopy__": lambda: [given(normal(*SHAPE).detach(), {})],
    "record_stream": lambda: each(given(torch.Stream(device="cpu"))),
    **{name: lambda: [given(torch.complex(normal(*SHAPE), normal(*SHAPE, seed=2)))] for name in ("real", "imag")},
    # pointwise
    "clip": lambda: each(given(-1, 1), given(min=0), given(max=normal(*SHAPE, seed=2))),
    "logaddexp2": lambda: each(given(normal(*SHAPE, seed=2)), given(normal(4))),
    **{name: lambda: each(given()) for name in ("clone", "resolve_conj", "resolve_neg", "gelu", "hardswish")},
    "polygamma": lambda: [given(1, unit(*SHAPE))],
    "Tensor.polygamma": lambda: [given(unit(*SHAPE), 1)],
    "Tensor.polygamma_": lambda: [given(unit(*SHAPE), 1)],
    "Tensor.where": lambda: [given(normal(*SHAPE), MASK.expand(SHAPE), normal(*SHAPE, seed=2))],
    "leaky_relu": lambda: each(given(), given(0.3)),
    # copies
    **{name: lambda: each(given()) for name in ("contiguous", "ravel")},
    **{name: lambda: read() for name in ("empty_like", "ones_like", "zeros_like")},
    "full_like": lambda: [given(normal(*SHAPE).detach(), 1.5)],
    "expand_as": lambda: [given(normal(2, 1, 6, 4, 4), normal(*SHAPE))],
    "reshape_as": lambda: each(given(normal(2, 18, 4, 4)), given(normal(2, 3, 6, 16))),
    "view_as": lambda: each(given(normal(2, 18, 4, 4)), given(normal(2, 3, 6, 16))),
    "t": lambda: [given(normal(6, 4))],
    "T": lambda: [given(normal(6, 4))],
    "mT": lambda: each(given()),
    "Tensor.unfold": lambda: each(given(4, 2, 2), given(2, 3, 1), given(1, 2, 1)),
    # along dims, slices and joins
    "trapz": lambda: along(),
    "nanquantile": lambda: each(*(given(0.3, dim=dim) for dim in range(1, 5)), given(0.3)),
    "unique_consecutive": lambda: [given(tied(*SHAPE).detach())],
    "searchsorted": lambda: [given(normal(3).detach().sort().values, normal(*SHAPE).detach())],
    **{
        name: lambda: [
            given([normal(*SHAPE), normal(*SHAPE, seed=2)], **where) for where in ({}, *({"dim": d} for d in range(5)))
        ]
        for name in ("concat", "concatenate")
    },
    "split_with_sizes": lambda: each(given([2, 4], 2), given([1, 2], 1), given([1, 3], dim=3)),
    **{name: lambda: each(given(2), given((1,))) for name in ("vsplit", "hsplit", "dsplit")},
    "embedding": lambda: [given(tied(2, 6, 4, 4, dtype=torch.int64), normal(4, 5))],
    # products
    "mm": lambda: [given(normal(6, 4), normal(4, 6, seed=2))],
    "mv": lambda: [given(normal(6, 4), normal(4))],
    **{name: lambda: [given(normal(6), normal(6, seed=2))] for name in ("dot", "vdot")},
    **{name: lambda: [given(normal(6), normal(4, seed=2))] for name in ("outer", "ger")},
    "inner": lambda: each(given(normal(3, 4)), given(normal(*SHAPE, seed=2))),
    "tensordot": lambda: each(
        given(normal(3, 5), dims=([1], [0])),
        given(normal(4, 5), dims=1),
        given(normal(*SHAPE, seed=2), dims=[[2, 3, 4], [2, 3, 4]]),
    ),
    "addmm": lambda: [given(normal(6, 2), normal(6, 4), normal(4, 2))],
    "baddbmm": lambda: [given(normal(2, 6, 2), normal(2, 6, 4), normal(2, 4, 2))],
    "addmv": lambda: [given(normal(6), normal(6, 4), normal(4))],
    "scaled_dot_product_attention": lambda: [
        given(*(normal(2, 2, 6, 4, seed=seed) for seed in (1, 2, 3))),
        given(normal(2, 6, 4), normal(2, 7, 4), normal(2, 7, 3), scale=0.3),
    ],
    "multi_head_attention_forward": attended,
    # pooling, convolution, interpolation
    **{f"{kind}_pool1d": pooled(1) for kind in ("max", "avg", "adaptive_avg", "adaptive_max")},
    **{f"{kind}_pool2d": pooled(2) for kind in ("max", "avg", "adaptive_avg", "adaptive_max")},
    **{f"lp_pool{ndim}d": normed_pool(ndim) for ndim in (1, 2, 3)},
    **{f"conv{ndim}d": convolved(ndim) for ndim in (1, 2)},
    **{f"conv_transpose{ndim}d": convolved(ndim, transposed=True) for ndim in (1, 2)},
    "upsample": lambda: each(given(scale_factor=2), given((12, 8, 8), mode="trilinear")),
    # losses
    "soft_margin_loss": lambda: each(given(torch.where(MASK.expand(SHAPE), 1.0, -1.0).double())),
    "triplet_margin_with_distance_loss": lambda: each(given(normal(*SHAPE, seed=2), normal(*SHAPE, seed=3))),
    # norms
    "torch.batch_norm": lambda: each(
        given(normal(3), normal(3), None, None, True, 0.1, 1e-5, False),
        given(normal(3), normal(3), normal(3).detach(), unit(3).detach(), False, 0.1, 1e-5, False),
    ),
    # random numbers
    **{
        f"{name}_": constant
        for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
    },
    "geometric_": lambda: [given(*args, 0.4) for args, _ in constant()],
    "bernoulli": lambda: [given(torch.full((2, 3, 6, 6, 6), 0.4, dtype=torch.float64))],
    "randint_like": lambda: [given(*args, 9) for args, _ in constant()],
    "dropout1d": lambda: [given(-torch.ones(2, 3, 6, dtype=torch.float64, requires_grad=True), 0.4)],
    **{
        name: lambda: [
            given(-torch.ones(2, 3, 6, 6, 6, dtype=torch.float64, requires_grad=True), 0.4, train)
            for train in (True, False)
        ]
        for name in ("feature_dropout", "torch.dropout", "torch.dropout_")
    },
}

RANDOM_ENTRIES = frozenset(
    {f"Tensor.{name}_" for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal")}
    | {"Tensor.normal_", "Tensor.random_", "Tensor.uniform_", "torch.bernoulli", "Tensor.bernoulli"}
    | {"torch.rand_like", "torch.randn_like", "torch.randint_like"}
    | {f"F.dropout{kind}" for kind in ("", "1d", "2d", "3d")}
    | {"torch.dropout", "torch.dropout_", "torch.feature_dropout", "F.rrelu", "torch.rrelu"}
)
"""Entries that draw numbers."""

UNDEFINED_ENTRIES = frozenset({"torch.empty_like", "Tensor.new_empty"})
"""Entries whose values are whatever lay in memory."""


def leaf_and_double(x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    return leaf, leaf * 2


def backward(x: Tensor) -> Tensor | None:
    leaf, double = leaf_and_double(x)
    double.backward(torch.ones(x.shape, dtype=x.dtype))
    return leaf.grad


def backward_of_several(x: Tensor) -> Tensor | None:
    leaf, double = leaf_and_double(x)
    torch.autograd.backward([double], [torch.ones(x.shape, dtype=x.dtype)])
    return leaf.grad


def hooked(x: Tensor) -> Tensor | None:
    leaf, double = leaf_and_double(x)
    double.register_hook(lambda gradient: gradient * 3)
    (double * 2).sum().backward()
    return leaf.grad


def kept_gradient(x: Tensor) -> tuple[None, Tensor | None]:
    _, double = leaf_and_double(x)
    returned = double.retain_grad()
    (double * 3).backward(torch.ones(x.shape, dtype=x.dtype))
    return returned, double.grad


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Tensor.__dir__": lambda x: {"add", "shape"} <= set(x.__dir__()),
    "Tensor.grad_fn": lambda x: x.grad_fn is None,
    "Tensor.__format__": lambda x: type(format(x)),
    "Tensor.__iter__": lambda x: list(Tensor.__iter__(x)),
    # A slab that is part of a tensor is not contiguous; one of its own is.
    "Tensor.is_contiguous": lambda x: (x * 1).is_contiguous(),
    "Tensor.detach_": lambda x: (x * 1).detach_(),
    "Tensor.backward": backward,
    "autograd.backward": backward_of_several,
    "Tensor.register_hook": hooked,
    "Tensor.retain_grad": kept_gradient,
}
