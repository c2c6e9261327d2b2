"""Every module of torch's own test database as a spatial network, beside the plain one.

What ``operator_database`` does for functions: outputs, gradients of inputs and parameters, and buffers, after each of
two passes, in training and in evaluation.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from differential import Seen, Verdict, differentiated, draws, judge_seen, said, whole
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from volseg.errors import ParallelError
from volseg.parallel import ModelParallel

DEVICES = ["cpu", "cpu:1"]

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


def _observe(call: ModuleCall, net: nn.Module, passes: int, seed: int = 0) -> Seen | Exception:
    torch.manual_seed(seed)
    try:
        for _ in range(passes):
            seen = _passed(call, net)
        return seen
    except Exception as fault:
        return fault.with_traceback(None)


def _passed(call: ModuleCall, net: nn.Module) -> Seen:
    originals = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    leaves = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in originals}
    given = {key: leaf.clone() for key, leaf in leaves.items()}
    args, kwargs = tree_map(lambda leaf: given.get(id(leaf), leaf), (call.args, call.kwargs))
    values, structure = tree_flatten(net(*args, **kwargs))
    values = [whole(value) for value in values]
    gradients = differentiated(values, [*leaves.values(), *net.parameters()])
    flags = [value.requires_grad for value in values if isinstance(value, Tensor)]
    values = [value.detach() if isinstance(value, Tensor) else value for value in values]
    # A volume's slabs are copies: what happens to the caller's tensor is its own affair. Buffers are the network's.
    return Seen(structure, values, [b.detach().clone() for b in net.buffers()], flags, gradients, [], [], False)


def judge_module(call: ModuleCall) -> Verdict:
    """Say what a module does on slabs, beside itself on whole tensors."""
    for passes in (1, 2):
        try:
            plain = call.build()
            parallel: nn.Module | Exception = ModelParallel(
                copy.deepcopy(plain), strategy="spatial", devices=DEVICES, axes=call.axes
            )
        except ParallelError as fault:
            return Verdict("refused", detail=said(fault))
        except Exception as fault:
            return Verdict("CRASH", "construction", said(fault))
        expected, actual = _observe(call, plain, passes), _observe(call, parallel, passes)
        if isinstance(expected, Exception):
            return (
                Verdict("raises") if isinstance(actual, Exception) else Verdict("WRONG", "accepts what torch refuses")
            )
        if isinstance(actual, ParallelError):
            return Verdict("refused")
        if isinstance(actual, Exception):
            return Verdict("CRASH", "call", said(actual))
        if isinstance(plain, RANDOM) and call.training:
            others = [_observe(call, call.build(), passes, seed) for seed in (1, 2, 3)]
            if draws(expected, others):
                continue
        verdict = judge_seen(actual, expected, "" if passes == 1 else " of the second pass")
        if verdict.outcome != "equal":
            return verdict
    return Verdict("equal")
