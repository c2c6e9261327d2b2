"""Compare every module of torch's own test database on slabs with the plain one.

What ``operator_database`` does for functions: outputs, gradients of parameters, and buffers, in two steps of gradient
descent, in training and in evaluation.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from differential import Verdict, said
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from volseg.errors import ParallelError
from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import Values, compare_values, default_objective, eager_step, observe

RANDOM = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.MultiheadAttention,
)
"""Modules that may draw numbers while they train."""


def modules() -> list[Any]:
    """Return torch's modules with their samples."""
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


@dataclass(frozen=True)
class ModuleCall:
    """A module, the arguments of its ``forward``, and which of D, H, W is cut (None: the strategy's choice)."""

    info: Any
    construction: Any
    args: tuple
    kwargs: dict[str, Any]
    note: str
    training: bool
    axes: str | None

    def __str__(self) -> str:
        given = [*map(str, self.construction.args), *(f"{k}={v}" for k, v in self.construction.kwargs.items())]
        return f"{self.note} ({', '.join(given)})"

    def build(self) -> nn.Module:
        """Return the module; the same at every call."""
        torch.manual_seed(0)
        net = self.info.module_cls(*self.construction.args, **self.construction.kwargs)
        return net.to(torch.float64).train(self.training)


def module_calls(info: Any, thin: bool) -> Iterator[ModuleCall]:
    """List the calls of a module that have a volume among their arguments; ``thin``: the first of each mode."""
    for training in (True, False):
        torch.manual_seed(0)
        found = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
        for index, sample in enumerate(list(found)):
            given = sample.forward_input
            tensors = [leaf for leaf in tree_leaves((given.args, given.kwargs)) if isinstance(leaf, Tensor)]
            if not any(tensor.ndim in (4, 5) for tensor in tensors):
                continue
            for axes in (None,) if thin else (None, "H", "W", *("D" if tensors[0].ndim == 5 else "")):
                note = f"sample {index}, axes={axes}"
                yield ModuleCall(info, sample.constructor_input, given.args, given.kwargs, note, training, axes)
            if thin:
                break


def _observe(call: ModuleCall, net: nn.Module, leaves: bool, seed: int = 0) -> list[Values] | Exception:
    torch.manual_seed(seed)
    try:
        step = eager_step(lambda *args: net(*args, **call.kwargs), default_objective)
        return observe(net, call.args, step, steps=2, leaves=leaves)
    except Exception as fault:
        return fault.with_traceback(None)


def _find_wrong(found: list[Values], expected: list[Values]) -> list[str]:
    wrong = [name for pair in zip(expected, found, strict=True) for name in compare_values(*pair).wrong]
    # A volume's slabs are copies: what happens to the caller's tensor is its own affair.
    return [name for name in wrong if not name.endswith("after the call")]


def judge_module(call: ModuleCall) -> Verdict:
    """Say what a module does on slabs, beside itself on whole tensors."""
    plain = call.build()
    try:
        parallel = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=["cpu", "cpu:1"], axes=call.axes)
    except ParallelError as fault:
        return Verdict("refused", detail=said(fault))
    # torch refuses to change an input in place that needs a gradient.
    leaves = not isinstance(_observe(call, copy.deepcopy(plain), True), Exception)
    expected, actual = _observe(call, plain, leaves), _observe(call, parallel, leaves)
    if isinstance(expected, Exception):
        return Verdict("raises") if isinstance(actual, Exception) else Verdict("WRONG", "accepts what torch refuses")
    if isinstance(actual, ParallelError):
        return Verdict("refused")
    if isinstance(actual, Exception):
        return Verdict("CRASH", "call", said(actual))
    if isinstance(plain, RANDOM) and call.training:
        others = [_observe(call, call.build(), leaves, seed) for seed in (1, 2, 3)]
        if any(isinstance(other, Exception) or _find_wrong(other, expected) for other in others):
            return Verdict("equal")
    wrong = _find_wrong(actual, expected)
    return Verdict("WRONG", ", ".join(wrong[:5])) if wrong else Verdict("equal")
