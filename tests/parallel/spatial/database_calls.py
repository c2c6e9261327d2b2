"""The calls to compare: torch's own samples in every form that a network may write, and our samples.

Each operator as a function, as a method, as an operator, in place, under its other names, with its arguments by torch's
names and by NumPy's, with ``out=``, and with arguments that torch refuses.
"""

import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from differential import Call
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from volume_samples import DRAWN, handwritten, of_class, samples_of

RANDOM = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "nn.functional.alpha_dropout",
        "nn.functional.dropout",
        "nn.functional.dropout2d",
        "nn.functional.dropout3d",
        "nn.functional.feature_alpha_dropout.with_train",
        "nn.functional.fractional_max_pool2d",
        "nn.functional.fractional_max_pool3d",
        "nn.functional.multi_head_attention_forward",
        "nn.functional.rrelu",
        "nn.functional.scaled_dot_product_attention",
        "normal",
        "normal.in_place",
        "normal.number_mean",
        "pca_lowrank",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "svd_lowrank",
        "uniform",
    }
)
"""Operators that draw numbers: slabs need not draw those that the whole volume does."""

UNDEFINED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators whose values are whatever lay in memory."""

MOST_SAMPLES, MOST_OF_OTHERS = 100, 16
"""Samples of an operator in its first dtype; in each other dtype, and under each other name. Pooling has 1,440."""

OWN = "volumes."
"""Prefix of the lines about samples of our own."""


def database() -> list[Any]:
    """Return torch's operators with their samples."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            # The database's module imports it for a base class of torch's own tests, and uses nothing else of it.
            stub = types.ModuleType("expecttest")
            stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def seed() -> None:
    """Make the samples the same in every run."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (what torch's samplers draw from)


def functions(op: Any) -> Iterator[tuple[str, Callable]]:
    """Return every way to call an operator: function, method, operator, in place, and its other names."""
    found: list[tuple[str, Callable | None]] = [
        ("function", op.op),
        ("method", op.method_variant),
        ("in place", op.inplace_variant),
        ("operator", op.operator_variant),
        ("operator in place", op.inplace_operator_variant),
    ]
    for alias in op.aliases:
        found += [
            (alias.name, alias.op),
            (f"{alias.name} as a method", alias.method_variant),
            (f"{alias.name} in place", alias.inplace_variant),
        ]
    seen: set[int] = set()
    for variant, function in found:
        if function is not None and id(function) not in seen:
            seen.add(id(function))
            yield variant, function


def samples(op: Any, dtype: torch.dtype) -> list[tuple[tuple, dict[str, Any]]]:
    """Return the arguments of an operator's samples."""
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    seed()
    # Not ``op.sample_inputs``: it looks through the call stack and sets every device's seed, for each sample.
    found = list(op.sample_inputs_func(op, "cpu", dtype, differentiable))
    return [((sample.input, *sample.args), sample.kwargs) for sample in found]


def errors(op: Any) -> list[tuple[tuple, dict[str, Any]]]:
    """Return arguments that torch refuses."""
    if op.error_inputs_func is None:
        return []
    seed()
    found = [error.sample_input for error in op.error_inputs_func(op, "cpu")]
    return [((sample.input, *sample.args), sample.kwargs) for sample in found]


def dtypes(op: Any) -> list[torch.dtype]:
    """Return the dtypes to try: the first is the one of the thinned form."""
    first = [torch.float64, torch.float32, torch.int64, torch.bool]
    found = [dtype for dtype in first if op.supports_dtype(dtype, "cpu")][:1]
    more = [torch.complex128, torch.int32, torch.bool]
    return found + [dtype for dtype in more if op.supports_dtype(dtype, "cpu") and dtype not in found]


def renamed(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[str, tuple, dict[str, Any]]]:
    """Give arguments by name, under torch's names and under NumPy's; torch raises TypeError for most."""
    numpy = {"dim": "axis", "keepdim": "keepdims"}
    if numpy.keys() & kwargs.keys():
        yield "axis=", args, {numpy.get(key, key): value for key, value in kwargs.items()}
    first, *rest = args
    if not rest:
        for name in ("input", "x", "a", "x1"):
            yield f"{name}=", (), {name: first, **{numpy.get(key, key): value for key, value in kwargs.items()}}
    elif len(rest) == 1:
        for one, two in (("input", "other"), ("x1", "x2"), ("input", "dim"), ("a", "axis"), ("x", "axis")):
            yield f"{one}=, {two}=", (), {one: first, two: rest[0], **kwargs}
        for name in ("dim", "axis", "other", "x2"):
            yield f"{name}=", (first,), {name: rest[0], **kwargs}
    elif len(rest) == 2:
        for one, two in (("dim", "keepdim"), ("axis", "keepdims")):
            yield f"{one}=, {two}=", (first,), {one: rest[0], two: rest[1], **kwargs}


def few(found: Sequence[tuple[tuple, dict[str, Any]]]) -> set[int]:
    """Choose two samples: the one with the most dims, and the last one that can be cut."""
    ranks = {}
    for index, sample in enumerate(found):
        tensors = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
        if tensors and any(size > 1 for size in tensors[0].shape):
            ranks[index] = tensors[0].ndim
    return {max(ranks, key=lambda index: ranks[index]), max(ranks)} if ranks else set()


def calls(op: Any, thin: bool) -> Iterator[tuple[Call, bool]]:
    """List an operator's calls, and whether each belongs to the thinned form; ``thin``: only those."""
    name, names = name_of(op), {alias.name for alias in op.aliases}
    for order, dtype in enumerate(dtypes(op)[: 1 if thin else None]):
        found = samples(op, dtype)
        chosen = few(found) if order == 0 else set()
        spread = set(range(0, len(found), -(-len(found) // MOST_SAMPLES) or 1)) | chosen
        others = set(range(0, len(found), -(-len(found) // MOST_OF_OTHERS) or 1)) | chosen
        for index in sorted(chosen if thin else spread if order == 0 else others):
            args, kwargs = found[index]
            note = f"sample {index} of {str(dtype).removeprefix('torch.')}"
            call = Call(name, "function", op.op, args, kwargs, note, name in RANDOM, name in UNDEFINED)
            for variant, function in functions(op):
                if index in others or variant.partition(" ")[0] not in names:
                    yield replace(call, variant=variant, function=function), index in chosen
            last = index == max(chosen, default=-1)
            if last or (order == 0 and (index in chosen or index < 4) and not thin):
                yield from ((other, last) for other in extra(op, call))
    for index, (args, kwargs) in enumerate([] if thin else errors(op)):
        for variant, function in functions(op):
            yield Call(name, variant, function, args, kwargs, f"error {index}"), False


def extra(op: Any, call: Call) -> Iterator[Call]:
    """Derive calls from a sample: arguments by other names, and results written to ``out=``."""
    for variant, args, kwargs in renamed(call.args, call.kwargs):
        other = replace(call, variant=variant, args=args, kwargs=kwargs)
        if not isinstance(other.plain("call"), TypeError):
            yield other
    if op.supports_out:
        detached = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs))
        seed()
        try:
            result = op.op(*detached[0], **detached[1])
        except Exception:  # an operator that torch itself does not run: nothing to write
            return
        if any(not isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return
        out = tree_map(torch.zeros_like, tuple(result) if isinstance(result, tuple) else result)
        yield replace(call, variant="out=", args=detached[0], kwargs={**detached[1], "out": out})


def own_calls(name: str, op: Any | None, thin: bool) -> Iterator[tuple[Call, bool]]:
    """List the calls on samples of our own, of an operator of the database or of a name of torch, as ``calls`` does."""
    found = samples_of(name) if op is None else of_class(op)
    variants = list(handwritten(name) if op is None else functions(op))
    for index, (args, kwargs) in enumerate(found):
        few = index == 0 or index % 12 == 2
        for variant, function in variants if few or not thin else ():
            call = Call(OWN + name, variant, function, args, kwargs, f"sample {index}", name in DRAWN, grids=True)
            yield call, few
