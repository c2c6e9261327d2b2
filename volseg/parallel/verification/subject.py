"""Prepare the plain network of a comparison: find the values that can be compared, and notes for the report.

Values are compared only if the plain network repeats them with its dropout off.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from volseg.device.module_internals import DropoutNd
from volseg.device.torch_internals import tree_map_only
from volseg.errors import GridError, ParallelError
from volseg.parallel.devices import list_gpus
from volseg.parallel.state.random import seeded
from volseg.parallel.verification.comparison import (
    TOLERANCE,
    Values,
    compare_values,
    eager_step,
    find_kind,
    join,
    observe,
    observe_call,
)


def cut_pieces(inputs: Sequence[Any], split_size: int, batched: Collection[int] | None) -> list[list[Any]]:
    """Cut into micro-batches, as a pipeline does, the inputs at ``batched``, or else those as long as the batch."""
    batch = len(inputs[0])
    cut = [
        value.split(split_size)
        if isinstance(value, Tensor) and value.dim() and len(value) == batch and (batched is None or place in batched)
        else None
        for place, value in enumerate(inputs)
    ]
    return [
        [value if parts is None else parts[number] for value, parts in zip(inputs, cut, strict=True)]
        for number in range(-(-batch // split_size))
    ]


class Subject:
    """A copy of the network in training or in evaluation mode, in float64 on the first device.

    Attributes
    ----------
    net
        The user's network in float64, with its dropout off.
    trouble
        Why values cannot be compared; empty if they can.
    leaves
        Whether inputs may require gradients: not if the network changes them in place.
    notes
        Lines for the report.
    reference : callable
        Returns the values after a number of steps of the plain network: with gradients or without, whole or by
        micro-batches of a size.
    """

    def __init__(
        self,
        net: nn.Module,
        training: bool,
        shape: Sequence[int],
        more: Sequence[Any],
        home: torch.device,
        objective: Callable[[Any], Tensor],
        batched: Collection[int] | None,
    ) -> None:
        self.training, self.shape, self.objective, self.batched = training, tuple(shape), objective, batched
        self.state = "train" if training else "eval"
        self.net = _copy(net, training).to(home)
        generator = torch.Generator().manual_seed(0)
        volume = torch.randn(self.shape, dtype=torch.float64, generator=generator).to(home)
        self.inputs = [volume, *(_double(value, home) for value in more)]
        self.notes: list[str] = []
        if other := [name or "the network" for name, m in self.net.named_modules() if m.training != training]:
            self.notes.append(f"in {'eval' if training else 'train'} mode inside {self.state}: {name_few(other)}")
        for module in self.net.modules():
            if isinstance(module, DropoutNd) and module.training and module.p:  # the sides would draw different masks
                module.p = 0.0
                self.notes.append(f"{self.state}: compared with dropout off")
        self.reference = cache(self._train)
        self._probe()

    def _probe(self) -> None:
        """Test the plain network with two seeds, and find the inputs that it changes."""
        first, other = (self._forward(seed) for seed in (0, 1))
        self.trouble = ""
        if not _is_alike(first, other):
            self.trouble = (
                "the plain network differs between two seeds with dropout off: it draws random numbers outside "
                "of Dropout modules, or does not repeat itself"
            )
        after = {name: value for name, value in first.items() if find_kind(name) == "after"}
        given = {f"input {i} after the call": v.cpu() for i, v in enumerate(self.inputs) if isinstance(v, Tensor)}
        changed = [name for name, error in compare_values(given, after).errors.items() if error]
        self.leaves = not changed
        if changed:
            inputs = name_few([name.removesuffix(" after the call") for name in changed])
            self.notes.append(
                f"{self.state}: the network changes {inputs} in place; what is left there is compared, gradients of "
                f"inputs are not"
            )

    def _forward(self, seed: int) -> Values:
        with self._own_fault(), seeded(seed, list_gpus()):
            return observe_call(copy.deepcopy(self.net), self.inputs)

    def _train(self, steps: int, gradients: bool, split_size: int | None) -> list[Values]:
        """Train a copy of the plain network."""
        model = copy.deepcopy(self.net)

        def call(*arguments: Any) -> Any:
            if split_size is None:
                return model(*arguments)
            pieces = cut_pieces(arguments, split_size, self.batched)
            if gradients:  # the pieces of one tensor cannot be changed in place
                pieces = tree_map_only(Tensor, Tensor.clone, pieces)
            return join([model(*piece) for piece in pieces])

        with self._own_fault(), seeded(0, list_gpus()):
            return observe(model, self.inputs, eager_step(call, self.objective, gradients), steps, self.leaves)

    @contextmanager
    def _own_fault(self) -> Iterator[None]:
        """Raise an error of the block as an error of the plain network."""
        try:
            yield
        except Exception as fault:
            raise GridError(
                f"the plain network itself fails on this shape: {type(self.net).__name__} in {self.state} mode on "
                f"{self.shape} (float64, one device) raised {type(fault).__name__}: {fault}"
            ) from fault


def _copy(net: nn.Module, training: bool) -> nn.Module:
    """Return a copy in float64; modules in eval mode inside a network in training mode stay in eval mode."""
    if any(is_lazy(value) for value in (*net.parameters(), *net.buffers())):
        raise ParallelError("the network has lazy parameters without a shape yet; call it once before verify")
    try:
        copied = copy.deepcopy(net).double()
    except Exception as fault:
        raise ParallelError(
            f"verify compares copies, and copy.deepcopy of {type(net).__name__} failed: {fault}; make it copyable "
            f"(a tensor with history that is kept as an attribute is not: detach it)"
        ) from fault
    return copied if training and copied.training else copied.train(training)


def _double(value: Any, home: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(home, torch.float64 if value.is_floating_point() else value.dtype)


def _is_alike(one: Values, other: Values) -> bool:
    """Return whether outputs and buffers agree; GPUs may add in another order."""
    errors = compare_values(one, other).errors
    return all(error <= TOLERANCE for name, error in errors.items() if find_kind(name) in ("output", "buffer"))


def name_few(names: Sequence[str]) -> str:
    """Return the names in one line, only the first ones if there are many."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
