"""Decide whether a batch may be replayed, and find out whether ``forward`` always does the same.

A recording repeats kernels, not Python. It may stand for ``forward`` only where Python would do the same again, so:

* the first batches of each kind run eagerly, and a *signature* of every micro-batch (each function, what it
reads, its
  plain arguments) must come out the same each time: a layer dropped at random, a drawn factor or a counter shows;
* whatever Python could read is part of the key: shapes, plain arguments, modes, plain attributes of every module,
  which parameters require grad and where they lie, autocast;
* hooks of the user's are Python that must run: such networks stay eager.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from volseg.parallel.pipeline import run as runs
from volseg.parallel.pipeline.micro_batch import Call
from volseg.parallel.pipeline.placement import PlacedRun

__all__ = ["WARM_UP", "Watch", "WatchedRun", "situation"]

WARM_UP = 3
"""Eager batches before one is recorded."""

PLAIN = (bool, int, float, str, type(None))


def situation(net: nn.Module, call: Call, target: torch.device) -> Hashable | None:
    """Return what a recording depends on, or ``None`` where nothing can be recorded."""
    leaves, structure = pytree.tree_flatten(call)
    described: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        elif isinstance(leaf, PLAIN):
            described.append((leaf,))
        else:
            return None
    if any(map(runs.has_foreign_hooks, net.modules())):
        return None
    cast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu"))
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, target)
    return str(structure), tuple(described), modes, _condition(net)


def _condition(net: nn.Module) -> Hashable:
    """Everything plain that ``forward`` could read from its modules."""
    attributes = tuple(
        tuple((name, value) for name, value in vars(module).items() if isinstance(value, PLAIN))
        for module in net.modules()
    )
    states = tuple((state.data_ptr(), state.requires_grad) for state in (*net.parameters(), *net.buffers()))
    return attributes, states


class Watch:
    """Signatures of the eager batches of one kind."""

    def __init__(self) -> None:
        self.batches = 0
        self._signatures: dict[int, set[int]] = {}

    def note(self, samples: int, signature: int) -> None:
        """Add that of one micro-batch."""
        self._signatures.setdefault(samples, set()).add(signature)

    @property
    def is_steady(self) -> bool:
        """Whether micro-batches of one size have always done the same."""
        return all(len(found) == 1 for found in self._signatures.values())


class WatchedRun(PlacedRun):
    """A placed run that sums up what it did in ``signature``."""

    skips_quiet = False
    signature = 0
    _number = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        if not runs.keeps_place(function):
            name = getattr(function, "__name__", "")
            self.signature = hash(
                (self.signature, name, *map(self._describe, pytree.tree_leaves((args, kwargs or {}))))
            )
            self._number += 1
            for tensor in runs.tensors_of(result):
                tensor._volseg_order = self._number  # type: ignore[attr-defined]
        return result

    def _describe(self, leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return id(leaf) if id(leaf) in self.placement.owners else getattr(leaf, "_volseg_order", None)
        return leaf if isinstance(leaf, PLAIN) else str(type(leaf))
