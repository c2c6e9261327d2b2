"""Large ordinary tensors that wait until a volume says which rows of them its shards want.

A network computes the masks of its shifted windows as differences of small tensors, ``(windows, 1, N)`` less
``(windows, N, 1)``, and each shard adds those of its own windows. Written, all of them are computed everywhere, in
tensors as large as the scores of attention, and then the own ones are copied. Here such a difference waits, and so does
what follows from it entry by entry; where a volume meets it that is cut along its rows, each shard computes its own.

Whoever else reads it gets an ordinary tensor, as torch computes it. Nothing that has a gradient waits. A network is
looked at only after one of its passes has cut a large tensor: no other one meets a ``TorchFunctionMode``.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from volseg.device.fake_internals import FakeTensor
from volseg.device.torch_internals import make_wrapper_subclass, tree_map, without_subclass_overrides
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.plan.shards import Merged
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume, from_whole

__all__ = ["SUMS", "Uncut", "cut_later", "note_cut", "written"]

LARGE = 2**22
"""Elements from which on a tensor waits."""

GROWTH = 16
"""How many times as large as what it is computed of a tensor is that waits."""

OUTER = frozenset({torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__})

SUMS: frozenset[Any] = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
"""What volumes meet it in."""

VIEWS = frozenset({torch.unsqueeze, Tensor.unsqueeze})

EACH = frozenset(
    {torch.eq, torch.ne, Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__, torch.masked_fill, Tensor.masked_fill}
)

OUTLINE = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}
    | {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")}
)

ORDINARY = (Tensor, FakeTensor)


class Uncut(Tensor):
    """A tensor that waits: a function of others, whose rows are computed each by itself.

    Attributes
    ----------
    func, arguments
        What it is computed by: ordinary tensors whose rows are dim 0, others that wait, and numbers.
    rows
        The dim that a volume may be cut along.
    """

    func: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    rows: int
    _read: Unchanged
    _whole: Tensor | None = None
    _written: Unchanged
    _own: tuple[Context, Merged | None, list[Tensor]] | None = None

    @staticmethod
    def __new__(cls, func: Callable[..., Tensor], arguments: Sequence[Any], rows: int, outline: Tensor) -> "Uncut":
        """Wait; ``outline`` has the shape and the dtype."""
        device = next(given.device for given in arguments if isinstance(given, Tensor))
        shell = make_wrapper_subclass(cls, outline.shape, dtype=outline.dtype, device=device)
        shell.func, shell.arguments, shell.rows = func, tuple(arguments), rows
        shell._read = Unchanged([given for given in arguments if type(given) in ORDINARY])
        return shell

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, ShardedVolume) for kind in types):
            return NotImplemented  # a volume knows what to do
        with without_subclass_overrides():
            if func in OUTLINE:
                return func(*args, **(kwargs or {}))
            later = None if kwargs else _follow(func, args)
        return func(*written(args), **written(kwargs or {})) if later is None else later

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*written(args), **written(kwargs or {}))

    def whole(self) -> Tensor:
        """Return all of it, an ordinary tensor from now on."""
        with without_subclass_overrides():
            if self._whole is None:
                if self.func in VIEWS:
                    self._whole = self.func(self.arguments[0].whole(), *self.arguments[1:])
                else:
                    (self._whole,) = self._compute(lambda part, rows: [part])  # noqa: ARG005
                self._written = Unchanged([self._whole])
                self._own = None
            return self._whole

    def cut(self, dim: int, context: Context, merged: Merged | None) -> list[Tensor] | None:
        """Return the slabs of a volume of it that is cut along ``dim``; None where that is not how it is computed."""
        if self._whole is not None or dim != self.rows:
            return None
        if self.func in VIEWS:
            parent: Uncut = self.arguments[0]
            parts = parent.cut(parent.rows, context, merged)
            return None if parts is None else [self.func(part, *self.arguments[1:]) for part in parts]
        if self._own is None or self._own[0] is not context or self._own[1] != merged:
            found = self._compute(lambda part, rows: from_whole(part, [rows], context, merged).slabs)
            self._own = context, merged, found
        return self._own[2]

    def _compute(self, take: Callable[[Tensor, int], list[Tensor]]) -> list[Tensor]:
        """Return what is computed of the rows that ``take`` leaves; no step is kept longer than torch would."""
        steps = self._list_steps()
        last = {id(given): step for step in steps for given in step._waiting()}
        found: dict[int, list[Tensor]] = {}

        def read(given: Any) -> Iterable[Any]:
            if type(given) is Uncut:
                return found[id(given)]
            return take(given, 0) if isinstance(given, Tensor) else repeat(given)

        for step in steps:
            step._check()
            if step._whole is not None:
                found[id(step)] = take(step._whole, step.rows)
                continue
            columns = [read(given) for given in step.arguments]
            found[id(step)] = [step.func(*row) for row in zip(*columns)]  # noqa: B905 (numbers have no end)
            del columns
            for given in step._waiting():
                if last[id(given)] is step:
                    found.pop(id(given), None)
        return found[id(self)]

    def _list_steps(self) -> "list[Uncut]":
        """Return the tensors that wait and are read for this one, and it, each behind those that it reads."""
        steps: dict[int, Uncut] = {}

        def visit(step: Uncut) -> None:
            if id(step) in steps:
                return
            if step._whole is None:
                for given in step._waiting():
                    visit(given)
            steps[id(step)] = step

        visit(self)
        return list(steps.values())

    def _waiting(self) -> "list[Uncut]":
        return [given for given in self.arguments if type(given) is Uncut]

    def _check(self) -> None:
        if not (self._read if self._whole is None else self._written).holds():
            raise UnsupportedOperatorError(
                f"a tensor of shape {tuple(self.size())} is computed only now, where a volume meets it, and what it is "
                "computed of was changed in place meanwhile; do that out of place"
            )


def written(value: Any) -> Any:
    """Return nested arguments with ordinary tensors for those that wait."""
    return tree_map(lambda leaf: leaf.whole() if type(leaf) is Uncut else leaf, value)


def note_cut(operand: Tensor, context: Context) -> None:
    """Note that an ordinary tensor is cut: if it is large, the next one shall wait."""
    if operand.numel() >= LARGE and not operand.requires_grad:
        context.cuts_large = True


def cut_later(context: Context) -> AbstractContextManager[Any]:
    """Let large tensors wait in here, in a network that has cut some."""
    return _Waits() if context.cuts_large and context.communicator.num_shards > 1 else nullcontext()


class _Waits(TorchFunctionMode):
    """Looks for differences that grow."""

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        later = _begin(func, args) if func in OUTER and not kwargs else None
        return func(*args, **(kwargs or {})) if later is None else later


def _begin(func: Callable, args: tuple) -> Uncut | None:
    """Return a difference that waits; None of any other."""
    if len(args) != 2 or any(type(given) not in ORDINARY for given in args):
        return None
    first, second = args
    if (
        first.ndim < 2
        or first.ndim != second.ndim
        or first.shape[0] != second.shape[0]
        or first.device != second.device
    ):
        return None
    if first.requires_grad or second.requires_grad or first.is_inference() or second.is_inference():
        return None
    outline = _outline(func, args)
    least = max(LARGE, GROWTH * max(first.numel(), second.numel()))
    return Uncut(func, args, 0, outline) if outline.numel() >= least else None


def _follow(func: Callable, args: tuple) -> Uncut | None:
    """Return what follows from tensors that wait, entry by entry; None of any other function."""
    given = [each for each in args if type(each) is Uncut]
    if (func not in EACH and func not in VIEWS) or type(args[0]) is not Uncut:
        return None
    alike = all(each.shape == args[0].shape and each.rows == args[0].rows and each._whole is None for each in given)
    if not alike or any(type(each) not in (Uncut, int, float) for each in args):
        return None
    outline = _outline(func, args)
    if func not in VIEWS:
        return Uncut(func, args, args[0].rows, outline)
    return Uncut(func, args, args[0].rows + (args[1] % outline.ndim <= args[0].rows), outline)


def _outline(func: Callable, args: tuple) -> Tensor:
    """Return a result without values, or refuse what torch refuses."""
    outline: Tensor = func(*(_on_meta(each) if isinstance(each, Tensor) else each for each in args))
    return outline


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
