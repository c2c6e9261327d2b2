"""Samples of volume size, (B, C, D, H, W), for the operators that segmentation uses.

The database's own samples are small and of any shape; these are cut along D, H, W and along two of them at once. Values
repeat in some, as they do in images: who breaks a tie decides about the gradient. Some have sizes that torch refuses.
"""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPE = (2, 3, 6, 4, 4)
SLAB = (2, 3, 3, 4, 4)
"""The shape of one of two slabs: a volume of this shape must not be taken for one."""

Sample = tuple[tuple, dict[str, Any]]


def normal(*shape: int, seed: int = 1) -> Tensor:
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return numbers.requires_grad_()


def tied(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    numbers = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return numbers.requires_grad_() if dtype.is_floating_point else numbers


def unit(*shape: int, seed: int = 1) -> Tensor:
    """Return numbers between 0.1 and 0.9."""
    numbers = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (0.1 + 0.8 * numbers).requires_grad_()


def given(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


DIMS: list[Any] = [*range(5), -1, -3, (2, 3, 4), (0, 2, 3, 4), (-1, -2, -3), (0, 1), *combinations((1, 2, 3, 4), 2)]
KEEP: list[dict[str, Any]] = [{}, {"keepdim": True}, {"keepdim": False}]


def volumes() -> list[Tensor]:
    return [normal(*SHAPE), tied(*SHAPE)]


def is_own(op: Any) -> bool:
    """Say whether samples can be made from what the database says of an operator."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

    return isinstance(op, BinaryUfuncInfo | ReductionOpInfo | UnaryUfuncInfo)


def of_class(op: Any) -> list[Sample]:
    """Return volumes for a pointwise operator or a reduction of the database."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    if isinstance(op, UnaryUfuncInfo):
        return _unary(op)
    if isinstance(op, BinaryUfuncInfo):
        return _binary(op)
    return _reduction(op)


def _made(op: Any, shape: tuple[int, ...], seed: int, low: float | None = None, high: float | None = None) -> Tensor:
    numbers = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    low, high = -3.0 if low is None else low + 0.1, 3.0 if high is None else high - 0.1
    numbers = numbers * (high - low) + low
    if op.supports_dtype(torch.float64, "cpu"):
        return numbers.requires_grad_(op.supports_autograd)
    dtype = torch.int64 if op.supports_dtype(torch.int64, "cpu") else torch.bool
    return numbers.round().abs().to(dtype) if dtype == torch.int64 else numbers > 0


def _unary(op: Any) -> list[Sample]:
    made = _made(op, SHAPE, 1, *op.domain)
    settings, _ = op.sample_kwargs("cpu", made.dtype, made)
    return [given(made, **settings)]


def _binary(op: Any) -> list[Sample]:
    def operand(shape: tuple[int, ...], seed: int, settings: dict[str, Any]) -> Tensor:
        made = _made(op, shape, seed, settings.get("low"), settings.get("high"))
        # As in the database, for operators that divide.
        return made.detach().masked_fill(made == 0, 1).requires_grad_(made.requires_grad)

    left = operand(SHAPE, 1, op.lhs_make_tensor_kwargs)
    shapes = [SHAPE, (1, 3, 1, 1, 1), (3, 1, 1, 1), (1, 1, 6, 1, 1), (2, 1, 6, 4, 4), (6, 4, 4), (4,), (1,), ()]
    refused = [SLAB, (2, 3, 2, 4, 4), (3, 4, 4), (2, 3, 6, 2, 4), (2, 3, 6, 4, 2), (2, 3, 12, 4, 4)]
    right = {shape: operand(shape, 2, op.rhs_make_tensor_kwargs) for shape in (*shapes, *refused)}
    found = [given(left, right[shape]) for shape in right]
    found += [given(right[shape], left) for shape in right if shape != SHAPE]
    if op.supports_rhs_python_scalar:
        found += [given(left, 2), given(left, 2.5 if left.is_floating_point() else 1)]
    return found


def _reduction(op: Any) -> list[Sample]:
    dims: list[Any] = [dim for dim in DIMS if op.supports_multiple_dims or isinstance(dim, int)]
    inputs = volumes() if op.supports_dtype(torch.float64, "cpu") else [tied(*SHAPE, dtype=torch.int64)]
    inputs = [tensor if op.supports_autograd else tensor.detach() for tensor in inputs]
    args, _ = next(iter(op.generate_args_kwargs(inputs[0])), ((), {}))
    settings: list[dict[str, Any]] = [{}, *({"dim": dim, **keep} for dim, keep in product(dims, KEEP))]
    if not op.name.startswith("masked"):
        settings += [{"axis": dim, **keep} for dim, keep in product(dims[::3], ({}, {"keepdims": True}))]
    if op.name in ("var", "std"):
        more = [{"unbiased": False}, {"correction": 0}, {"correction": 2}]
        settings += [{"dim": dim, **setting} for dim, setting in product(dims, more)]
    if op.name in ("sum", "prod", "mean", "nansum", "nanmean"):
        settings += [{"dtype": torch.float32, **({} if dim is None else {"dim": dim})} for dim in (2, (2, 3, 4)[:1], 1)]
    return [given(tensor, *args, **setting) for tensor, setting in product(inputs, settings)]


def along(*options: dict[str, Any], dims: Any = tuple(range(5)), ties: bool = True) -> list[Sample]:
    """Return every dim by torch's name and one by NumPy's, with every choice of options."""
    inputs = volumes() if ties else volumes()[:1]
    named: list[dict[str, Any]] = [{"dim": dim} for dim in dims] + [{"axis": dim} for dim in (1, 2)]
    return [given(x, **name, **option) for x, name, option in product(inputs, named, options or ({},))]


def each(*cases: Sample) -> list[Sample]:
    """Put a volume in front of the arguments."""
    return [((normal(*SHAPE), *args), kwargs) for args, kwargs in cases]


INDEX = torch.tensor([2, 0, 1])
MASK = torch.arange(96).reshape(6, 4, 4) % 3 == 0

KEYS: list[Any] = [
    0,
    (slice(None), 1),
    (slice(None), slice(None), 2),
    (slice(None), slice(None), slice(1, 5)),
    (slice(None), slice(None), slice(None, None, 2)),
    (slice(None), slice(None), slice(3, None), slice(None, 2), 1),
    (Ellipsis, 0),
    (Ellipsis, slice(1, 3), slice(None), slice(None)),
    (slice(None), None),
    (slice(None), [0, 2]),
    (slice(None), slice(None), [0, 2]),
    (slice(None), INDEX),
    (slice(None), slice(None), INDEX),
    (0, 1, 2, 3, 1),
    MASK.expand(SHAPE),
    (Ellipsis, MASK),
    True,
    (slice(None), slice(None), slice(4, 2)),
    (slice(None), slice(None), 7),
]


def written(key: Any) -> list[Sample]:
    """Assign a number, and what fits, to a part of a volume."""
    part = torch.empty(SHAPE)[key].shape if key is not KEYS[-1] else torch.Size([4])
    return [given(normal(*SHAPE), key, 0.5), given(normal(*SHAPE), key, normal(*part, seed=2))]


HANDWRITTEN: dict[str, Callable[[], list[Sample]]] = {
    # reductions and functions along a dim
    **dict.fromkeys(("max", "min", "median"), lambda: [given(x) for x in volumes()] + along(*KEEP)),
    **dict.fromkeys(("nanmedian", "mode", "aminmax"), lambda: along(*KEEP[:2])),
    "logsumexp": lambda: along(*KEEP, dims=DIMS),
    "norm": lambda: (
        along(*KEEP[:2], dims=DIMS) + along({"p": 1}, {"p": float("inf")}, {"p": "fro"}, {"p": "nuc"}, dims=DIMS[-6:])
    ),
    "linalg.norm": lambda: along({}, {"ord": 1}, {"ord": 2}, {"ord": float("inf")}, {"ord": "fro"}, dims=DIMS),
    "linalg.matrix_norm": lambda: along({}, {"ord": 2}, dims=list(combinations((1, 2, 3, 4), 2)), ties=False),
    "var_mean": lambda: along(*KEEP[:2], {"correction": 0}, {"unbiased": False}, dims=DIMS),
    "std_mean": lambda: along(*KEEP[:2], {"correction": 0}, dims=DIMS),
    "quantile": lambda: [
        given(x, q, **setting)
        for x, q, setting in product(
            volumes(),
            (0.3, torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.2, 0.8], dtype=torch.float64)),
            ({}, *({"dim": d} for d in range(5)), {"dim": 2, "keepdim": True}, {"dim": 1, "keepdim": True}),
        )
    ],
    "softmax": lambda: along({}, {"dtype": torch.float32}),
    **dict.fromkeys(("log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), along),
    "sort": lambda: along({}, {"descending": True}, {"stable": True}),
    "argsort": lambda: along({}, {"descending": True}),
    "topk": lambda: along({"k": 2}, {"k": 2, "largest": False}),
    "kthvalue": lambda: along({"k": 2}),
    "diff": lambda: along({}, {"n": 2}),
    "trapezoid": along,
    "renorm": lambda: along({"p": 2, "maxnorm": 1.0}, ties=False),
    "cosine_similarity": lambda: [given(normal(*SHAPE), normal(*SHAPE, seed=2), dim=dim) for dim in range(5)],
    "normalize": lambda: along({}, {"p": 1.0}, dims=DIMS, ties=False),
    "unique": lambda: [given(tied(*SHAPE))],
    "bincount": lambda: [given(tied(288, dtype=torch.int64))],
    "histc": lambda: [given(normal(*SHAPE).detach(), bins=5, min=-1, max=1)],
    "dist": lambda: [given(normal(*SHAPE), normal(*SHAPE, seed=2)), given(normal(*SHAPE), normal(*SLAB))],
    "allclose": lambda: [given(normal(*SHAPE), normal(*SHAPE)), given(normal(*SHAPE), normal(*SHAPE, seed=2))],
    "equal": lambda: [given(normal(*SHAPE), normal(*SHAPE)), given(normal(*SHAPE), normal(*SLAB))],
    # shapes
    "permute": lambda: each(given((0, 2, 1, 3, 4)), given((4, 3, 2, 1, 0)), given(dims=(0, 2, 3, 4, 1))),
    "transpose": lambda: each(*(given(*pair) for pair in combinations(range(5), 2)), given(dim0=2, dim1=-1)),
    "swapaxes": lambda: each(given(1, 2), given(axis0=2, axis1=3)),
    "swapdims": lambda: each(given(1, 2), given(dim0=2, dim1=3)),
    "movedim": lambda: each(given(1, -1), given((2, 3), (3, 2)), given(source=2, destination=0)),
    "moveaxis": lambda: each(given(1, -1), given(source=2, destination=0)),
    "reshape": lambda: each(
        *map(
            given, [(2, 3, -1), (6, 6, 16), (-1,), (2, 18, 4, 4), (2, 3, 2, 3, 4, 4), (2, 3, 3, 2, 4, 4), (2, 3, 24, 4)]
        )
    ),
    "view": lambda: each(
        *map(given, [(2, 3, -1), (6, 6, 16), (-1,), (2, 18, 4, 4), (2, 3, 6, 16), (2, 3, 6, 2, 2, 4)])
    ),
    "flatten": lambda: each(given(), *(given(*pair) for pair in combinations(range(5), 2)), given(start_dim=2)),
    "unflatten": lambda: each(
        given(2, (2, 3)), given(2, (3, 2)), given(2, (-1, 1)), given(1, (3, 1)), given(3, (2, 2))
    ),
    "squeeze": lambda: [
        given(normal(1, 1, 6, 4, 4)),
        *(given(normal(1, 1, 6, 4, 4), dim) for dim in (0, 1, 2, (0, 1), (0, 2))),
        given(normal(1, 1, 6, 4, 4), axis=1),
    ],
    "unsqueeze": lambda: each(*(given(dim) for dim in (0, 2, 3, 5, -1, -3)), given(axis=2)),
    "expand": lambda: [
        given(normal(2, 1, 6, 4, 4), size) for size in ((2, 3, 6, 4, 4), (-1, 3, -1, -1, -1), (5, 2, 3, 6, 4, 4), SLAB)
    ],
    "broadcast_to": lambda: [given(normal(2, 1, 6, 4, 4), size) for size in ((2, 3, 6, 4, 4), SLAB)],
    "repeat": lambda: each(*map(given, [(1, 2, 1, 1, 1), (1, 1, 2, 1, 1), (2, 1, 1, 1, 1, 1), (1, 1, 1, 1, 3)])),
    "tile": lambda: each(*map(given, [(2,), (1, 2, 1, 1, 1), (2, 1, 1)])),
    "repeat_interleave": lambda: each(given(2), given(2, 1), given(2, dim=2), given(torch.tensor([1, 2, 0]), dim=1)),
    "narrow": lambda: each(
        *(given(dim, 1, 2) for dim in range(1, 5)), given(2, -3, 2), given(dim=2, start=0, length=5)
    ),
    "select": lambda: each(*(given(dim, 1) for dim in range(5)), given(2, -1), given(dim=2, index=3)),
    "chunk": lambda: each(*(given(2, dim) for dim in range(5)), given(4, 2), given(chunks=3, dim=2)),
    "split": lambda: each(
        *(given(2, dim) for dim in range(5)), given([1, 5], 2), given([2, 1], dim=1), given([1, 2], 2)
    ),
    "tensor_split": lambda: each(*(given(2, dim) for dim in range(5)), given((1, 4), 2), given((1,), dim=1)),
    "unbind": lambda: each(given(), *(given(dim) for dim in range(1, 5))),
    "flip": lambda: each(*(given((dim,)) for dim in range(5)), given((2, 3, 4)), given(dims=(2,))),
    **dict.fromkeys(("fliplr", "flipud"), lambda: each(given())),
    "rot90": lambda: each(given(1, (2, 3)), given(2, (3, 4)), given(1, (1, 2))),
    "roll": lambda: each(given(2, 2), given((1, -2), (2, 3)), given(3), given(shifts=1, dims=1), given(7, 2)),
    "index_select": lambda: each(*(given(dim, torch.tensor([1, 0, 1])) for dim in range(5))),
    "gather": lambda: (
        [given(normal(*SHAPE), dim, torch.zeros(SHAPE, dtype=torch.int64).fill_(1)) for dim in range(5)]
        + [given(normal(*SHAPE), 1, torch.ones(SLAB, dtype=torch.int64))]
    ),
    "take_along_dim": lambda: [given(normal(*SHAPE), torch.ones(SHAPE, dtype=torch.int64), dim) for dim in range(5)],
    "scatter": lambda: [
        given(normal(*SHAPE), dim, torch.ones(SHAPE, dtype=torch.int64), source)
        for dim, source in product(range(5), (1.5, normal(*SHAPE, seed=2)))
    ],
    "scatter_add": lambda: [
        given(normal(*SHAPE), dim, torch.ones(SHAPE, dtype=torch.int64), normal(*SHAPE, seed=2)) for dim in range(5)
    ],
    "index_add": lambda: each(given(1, INDEX, normal(*SHAPE, seed=2)), given(2, INDEX, normal(*SLAB, seed=2))),
    "index_fill": lambda: each(*(given(dim, torch.tensor([1]), 0.5) for dim in range(5))),
    "index_copy": lambda: each(given(1, INDEX, normal(*SHAPE, seed=2)), given(2, INDEX, normal(*SLAB, seed=2))),
    "masked_fill": lambda: each(given(MASK, 1.5), given(MASK.expand(SHAPE), 1.5), given(MASK[:3], 1.5)),
    "masked_select": lambda: each(given(MASK), given(MASK.expand(SHAPE))),
    "masked_scatter": lambda: each(given(MASK.expand(SHAPE), normal(*SHAPE, seed=2))),
    "__getitem__": lambda: each(*map(given, KEYS)),
    "__setitem__": lambda: [sample for key in KEYS for sample in written(key)],
    "where": lambda: [
        given(MASK, normal(*SHAPE), normal(*SHAPE, seed=2)),
        given(MASK.expand(SHAPE), normal(*SHAPE), 0.5),
        given(MASK.expand(SHAPE), 0.5, normal(6, 1, 1)),
        given(MASK[:3], normal(*SHAPE), normal(*SHAPE, seed=2)),
        given(MASK.expand(SHAPE)),
    ],
    "cat": lambda: (
        [
            given([normal(*SHAPE), normal(*SHAPE, seed=2)], **where)
            for where in ({}, *({"dim": dim} for dim in range(5)), {"axis": 1}, {"axis": 2})
        ]
        + [given([normal(*SHAPE), normal(*SLAB)], dim=dim) for dim in (1, 2)]
    ),
    "stack": lambda: (
        [
            given([normal(*SHAPE), normal(*SHAPE, seed=2)], **where)
            for where in ({}, {"dim": 2}, {"dim": -1}, {"axis": 1})
        ]
        + [given([normal(*SHAPE), normal(*SLAB)])]
    ),
    **dict.fromkeys(("hstack", "vstack", "dstack"), lambda: [given([normal(*SHAPE), normal(*SHAPE, seed=2)])]),
    "meshgrid": lambda: [given(normal(4), normal(6))],
    **dict.fromkeys(("tril", "triu"), lambda: each(given(), given(1))),
    "diagonal": lambda: each(given(), given(0, 2, 3), given(0, 3, 4), given(offset=1, dim1=1, dim2=2)),
    "unfold": lambda: [given(normal(2, 3, 6, 4), 2), given(normal(2, 3, 6, 4), (3, 1), padding=(1, 0))],
    "pixel_shuffle": lambda: [given(normal(2, 4, 6, 4), 2)],
    "pixel_unshuffle": lambda: [given(normal(2, 4, 6, 4), 2)],
    "channel_shuffle": lambda: [given(normal(2, 4, 6, 4, 4), 2)],
    "one_hot": lambda: [given(tied(2, 6, 4, 4, dtype=torch.int64)), given(tied(2, 6, 4, 4, dtype=torch.int64), 4)],
    "bucketize": lambda: [given(normal(*SHAPE).detach(), torch.tensor([-1.0, 0, 1], dtype=torch.float64))],
    "isin": lambda: [given(tied(*SHAPE).detach(), torch.tensor([0.0, 2], dtype=torch.float64))],
    "einsum": lambda: [
        given(rule, normal(*SHAPE), other)
        for rule, other in (
            ("bcdhw,kc->bkdhw", normal(4, 3)),
            ("bcdhw,bcdhw->bc", normal(*SHAPE, seed=2)),
            ("bcdhw,bcdhw->bcdhw", normal(*SHAPE, seed=2)),
            ("bcdhw,d->bchw", normal(6)),
            ("bcdhw,wk->bcdhk", normal(4, 2)),
        )
    ],
    "matmul": lambda: [
        given(normal(*SHAPE), normal(4, 3)),
        given(normal(*SHAPE), normal(2, 3, 6, 4, 2, seed=2)),
        given(normal(*SHAPE), normal(2, 3, 3, 4, 2, seed=2)),
        given(normal(5, 4), normal(*SHAPE)),
        given(normal(*SHAPE), normal(4)),
    ],
    "bmm": lambda: [given(normal(6, 4, 3), normal(6, 3, 4)), given(normal(6, 4, 3), normal(3, 3, 4))],
    "linear": lambda: each(given(normal(5, 4), normal(5)), given(normal(5, 4)), given(weight=normal(5, 4), bias=None)),
    "bilinear": lambda: [given(normal(*SHAPE), normal(*SHAPE, seed=2), normal(5, 4, 4))],
    "addcmul": lambda: each(given(normal(*SHAPE, seed=2), normal(4), value=2), given(normal(*SLAB), normal(4))),
    "addcdiv": lambda: each(given(normal(*SHAPE, seed=2), unit(4), value=2), given(normal(*SLAB), unit(4))),
    "lerp": lambda: each(given(normal(*SHAPE, seed=2), 0.3), given(normal(*SHAPE, seed=2), unit(3, 1, 1, 1))),
    "clamp": lambda: each(
        given(-1, 1),
        given(min=0),
        given(max=normal(*SHAPE, seed=2)),
        given(min=normal(6, 1, 1), max=None),
        given(normal(*SLAB)),
    ),
    "nan_to_num": lambda: each(given(), given(nan=1.0)),
    # pooling
    **{
        name: lambda: [
            given(x, size, **setting)
            for x, size, setting in product(
                volumes(),
                (2, 3, (2, 1, 2)),
                ({}, {"stride": 1}, {"stride": 2, "padding": 1}, {"ceil_mode": True}, {"stride": 3, "ceil_mode": True}),
            )
        ]
        for name in ("max_pool3d", "avg_pool3d", "lp_pool3d")
    },
    "max_pool3d_with_indices": lambda: [given(x, 2) for x in volumes()],
    "adaptive_avg_pool3d": lambda: each(*map(given, [1, 2, (3, 2, 2), (4, None, 1), (6, 4, 4), (5, 3, 3)])),
    "adaptive_max_pool3d": lambda: [
        given(x, size, **setting)
        for x, size, setting in product(
            volumes(), (1, 2, (3, 2, 2), (4, None, 1), (5, 3, 3)), ({}, {"return_indices": True})
        )
    ],
    # convolution
    "conv3d": lambda: (
        [
            given(normal(*SHAPE), normal(4, 3, *size, seed=2), bias, **setting)
            for size, bias, setting in product(
                ((3, 3, 3), (1, 1, 1), (2, 2, 2), (3, 1, 2)),
                (None, normal(4, seed=3)),
                (
                    {},
                    {"padding": 1},
                    {"stride": 2, "padding": 1},
                    {"padding": "same"},
                    {"padding": "valid"},
                    {"dilation": 2, "padding": 2},
                ),
            )
        ]
        + [
            given(normal(*SHAPE), normal(6, 1, 3, 3, 3, seed=2), padding=1, groups=3),
            given(input=normal(*SHAPE), weight=normal(4, 3, 3, 3, 3, seed=2), padding=(1, 0, 1)),
            given(normal(3, 6, 4, 4), normal(4, 3, 3, 3, 3, seed=2), padding=1),
            given(normal(*SHAPE), normal(4, 2, 3, 3, 3, seed=2)),
            given(normal(*SHAPE), normal(4, 3, 7, 3, 3, seed=2)),
        ]
    ),
    "conv_transpose3d": lambda: [
        given(normal(*SHAPE), normal(3, 4, *size, seed=2), bias, **setting)
        for size, bias, setting in product(
            ((2, 2, 2), (3, 3, 3)),
            (None, normal(4, seed=3)),
            ({}, {"stride": 2}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2}, {"stride": 3}),
        )
    ],
    # interpolation
    "interpolate": lambda: [
        given(x, **setting)
        for x, setting in product(
            volumes(),
            [
                {"mode": mode, **size, **({"align_corners": True} if corners else {})}
                for mode, size, corners in product(
                    ("nearest", "nearest-exact", "trilinear", "area"),
                    (
                        *({"size": size} for size in (3, (6, 4, 4), (12, 8, 8), (5, 3, 7), (9, 4, 4))),
                        *({"scale_factor": factor} for factor in (2, 0.5, 1.3, 1.1, 0.9, (2.0, 1.0, 1.0), 1)),
                        {"scale_factor": 1.3, "recompute_scale_factor": True},
                    ),
                    (False, True),
                )
                if not corners or mode == "trilinear"
            ],
        )
    ],
    "pad": lambda: [
        given(normal(*SHAPE), sides, **setting)
        for sides, setting in product(
            ((1, 1), (1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 2, 1), (0, 0, 0, 0, -1, -2), (0, 0, 0, 0, 0, 0, 1, 0)),
            ({}, {"value": 1.5}, {"mode": "reflect"}, {"mode": "replicate"}, {"mode": "circular"}),
        )
    ],
    "grid_sample": lambda: [given(normal(*SHAPE), normal(2, 6, 4, 4, 3), align_corners=False)],
    # norms
    "instance_norm": lambda: each(
        given(),
        given(weight=normal(3), bias=normal(3)),
        given(None, None, normal(3), normal(3)),
        given(eps=0.1),
        given(normal(3).detach(), unit(3).detach()),
        given(normal(3).detach(), unit(3).detach(), use_input_stats=False),
    ),
    "batch_norm": lambda: each(
        given(None, None, training=True),
        given(normal(3).detach(), unit(3).detach()),
        given(normal(3).detach(), unit(3).detach(), normal(3), normal(3), True, 0.3),
        given(running_mean=normal(3).detach(), running_var=unit(3).detach(), weight=normal(3), training=True, eps=0.1),
    ),
    "group_norm": lambda: each(
        given(1), given(3, normal(3), normal(3)), given(num_groups=3, weight=normal(3)), given(2)
    ),
    "layer_norm": lambda: each(
        given((4,)),
        given((4, 4), normal(4, 4), normal(4, 4)),
        given(SHAPE[1:]),
        given(SHAPE[2:], weight=normal(*SHAPE[2:])),
    ),
    "rms_norm": lambda: each(given((4,)), given((4, 4), normal(4, 4)), given(SHAPE[2:])),
    "local_response_norm": lambda: each(given(3), given(2, alpha=0.1, beta=0.5, k=2.0)),
    "prelu": lambda: each(given(normal(1)), given(normal(3)), given(weight=normal(3)), given(normal(6))),
    "glu": lambda: [given(normal(2, 4, 6, 4, 4), **where) for where in ({}, *({"dim": dim} for dim in range(5)))],
    "threshold": lambda: each(given(0.1, 2.0), given(threshold=0.1, value=2.0)),
    # losses
    **{
        name: lambda: [
            given(normal(*SHAPE), target, **setting)
            for target, setting in product(
                (normal(*SHAPE, seed=2), normal(2, 3, 1, 4, 4, seed=2), normal(*SLAB, seed=2)), REDUCTIONS
            )
        ]
        for name in ("smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss")
    },
    **{
        name: lambda: [
            given(normal(*SHAPE), target, **setting, **weight)
            for target, setting, weight in product(
                (normal(*SHAPE, seed=2), normal(*SLAB, seed=2)),
                REDUCTIONS,
                ({}, {"weight": unit(*SHAPE, seed=3).detach()}, {"weight": unit(*SLAB).detach()}),
            )
        ]
        for name in ("mse_loss", "l1_loss")
    },
    "kl_div": lambda: [
        given(normal(*SHAPE), unit(*SHAPE, seed=2), **setting)
        for setting in (
            *REDUCTIONS,
            {"reduction": "batchmean"},
            {"log_target": True},
            {"log_target": True, "reduction": "sum"},
        )
    ],
    "binary_cross_entropy": lambda: [
        given(unit(*SHAPE), target.detach(), **setting, **weight)
        for target, setting, weight in product(
            (unit(*SHAPE, seed=2), unit(*SLAB)),
            REDUCTIONS,
            ({}, {"weight": unit(3, 1, 1, 1).detach()}, {"weight": unit(*SHAPE, seed=3).detach()}),
        )
    ],
    "binary_cross_entropy_with_logits": lambda: [
        given(normal(*SHAPE), target.detach(), **setting, **weight)
        for target, setting, weight in product(
            (unit(*SHAPE, seed=2), unit(*SLAB)),
            REDUCTIONS,
            (
                {},
                {"weight": unit(*SHAPE, seed=3).detach()},
                {"pos_weight": unit(3, 1, 1, 1).detach()},
                {"pos_weight": unit(6, 1, 1).detach(), "weight": unit(4).detach()},
            ),
        )
    ],
    "cross_entropy": lambda: [
        given(normal(*SHAPE), target, **setting, **more)
        for target, setting, more in product(
            (tied(2, 6, 4, 4, dtype=torch.int64), unit(*SHAPE, seed=2), tied(2, 3, 4, 4, dtype=torch.int64)),
            REDUCTIONS,
            (
                {},
                {"weight": unit(3).detach()},
                {"ignore_index": 1},
                {"label_smoothing": 0.1},
                {"label_smoothing": 0.1, "weight": unit(3).detach()},
            ),
        )
    ],
    "nll_loss": lambda: [
        given(normal(*SHAPE), target, **setting, **more)
        for target, setting, more in product(
            (tied(2, 6, 4, 4, dtype=torch.int64), tied(2, 3, 4, 4, dtype=torch.int64)),
            REDUCTIONS,
            ({}, {"weight": unit(3).detach()}, {"ignore_index": 1}),
        )
    ],
    "gaussian_nll_loss": lambda: [
        given(normal(*SHAPE), normal(*SHAPE, seed=2), unit(*SHAPE, seed=3), **setting, **more)
        for setting, more in product(REDUCTIONS[:4], ({}, {"full": True}, {"eps": 0.5}))
    ],
    "margin_ranking_loss": lambda: [
        given(normal(*SHAPE), normal(*SHAPE, seed=2), torch.ones(SHAPE, dtype=torch.float64), **setting)
        for setting in REDUCTIONS
    ],
    "hinge_embedding_loss": lambda: [
        given(normal(*SHAPE), torch.ones(SHAPE, dtype=torch.float64), **setting) for setting in REDUCTIONS
    ],
    "cosine_embedding_loss": lambda: [given(normal(12, 4), normal(12, 4, seed=2), torch.ones(12, dtype=torch.float64))],
    "multilabel_soft_margin_loss": lambda: [given(normal(*SHAPE), tied(*SHAPE).detach().clamp(max=1))],
    "triplet_margin_loss": lambda: [given(normal(*SHAPE), normal(*SHAPE, seed=2), normal(*SHAPE, seed=3))],
    "pairwise_distance": lambda: [given(normal(*SHAPE), normal(*SHAPE, seed=2)), given(normal(*SHAPE), normal(*SLAB))],
}

REDUCTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "mean"},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"reduction": "average"},
    {"size_average": False},
    {"reduce": False},
]


DRAWN = frozenset(
    {"dropout", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu", "rand_like", "randn_like"}
)
"""Functions that draw numbers; they get a constant volume, so that only the numbers differ between its planes."""

for drawn in sorted(DRAWN):
    HANDWRITTEN[drawn] = lambda: [
        given(-torch.ones(2, 3, 6, 6, 6, dtype=torch.float64, requires_grad=True), **option)
        for option in ({}, {"training": True}, {"training": False}, {"p": 1.0}, {"training": True, "inplace": True})
    ]


def samples_of(name: str) -> list[Sample]:
    """Return the samples of a name, but those that torch refuses for two reasons: which one it tells is its choice."""

    def is_twice_wrong(args: tuple, kwargs: dict[str, Any]) -> bool:
        leaves = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
        return kwargs.get("reduction") == "average" and any(leaf.shape in (SLAB, (2, 3, 4, 4)) for leaf in leaves)

    return [sample for sample in HANDWRITTEN[name]() if not is_twice_wrong(*sample)]


def handwritten(name: str) -> Iterator[tuple[str, Callable]]:
    """Return every function of torch that has this name, by what it is."""
    holders = {"function": torch, "functional": F, "method": Tensor, "in place": Tensor}
    space, _, bare = name.rpartition(".")
    if space:
        holders = {"function": getattr(torch, space)}
    for variant, holder in holders.items():
        function = getattr(holder, f"{bare}_" if variant == "in place" else bare, None)
        if function is not None:
            yield variant, function
