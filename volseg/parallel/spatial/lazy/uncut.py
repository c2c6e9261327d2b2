"""Large ordinary tensors that wait until a volume says which rows of them its shards want.

A network computes the masks of its shifted windows as differences of small tensors, ``(windows, 1, N)`` less
``(windows, N, 1)``, and each shard adds those of its own windows. Written, all of them are computed everywhere, in
tensors as large as the scores of attention, and then the own ones are copied. Here such a difference waits, and so does
what follows from it entry by entry; where a volume meets it that is cut along its rows, each shard computes its own.

Whoever else reads it gets an ordinary tensor, as torch computes it, and that is all that anybody can change: what it is
computed of are copies, small ones, and what follows from it is computed of them too. Nothing that has a gradient waits.
A network is looked at only after one of its passes has cut a large tensor: no other one meets a ``TorchFunctionMode``.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from volseg.device.torch_internals import (
    PLAIN_TENSORS,
    find_transform,
    get_version,
    is_forward_mode,
    make_wrapper_subclass,
    tree_leaves,
    tree_map,
    without_overrides,
    without_subclass_overrides,
)
from volseg.parallel.spatial.context import Context, saved_tensors_hooks
from volseg.parallel.spatial.plan.shards import Merged
from volseg.parallel.spatial.volume import ShardedVolume, from_whole

__all__ = ["SUMS", "Uncut", "cut_later", "note_cut", "shown", "written"]

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


class Uncut(Tensor):
    """A tensor that waits: a function of others, whose rows are computed each by itself.

    Attributes
    ----------
    func, arguments
        What it is computed by: ordinary tensors whose rows are dim 0 and that are nobody else's, others that wait, and
        numbers.
    rows
        The dim that a volume may be cut along.
    """

    func: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    rows: int
    _whole: Tensor | None = None
    _own: tuple[Context, Merged | None, list[Tensor]] | None = None

    @staticmethod
    def __new__(cls, func: Callable[..., Tensor], arguments: Sequence[Any], rows: int, outline: Tensor) -> "Uncut":
        """Wait; ``outline`` has the shape and the dtype."""
        device = next(given.device for given in arguments if isinstance(given, Tensor))
        shell = make_wrapper_subclass(cls, outline.shape, dtype=outline.dtype, device=device)
        shell.func, shell.arguments, shell.rows = func, tuple(arguments), rows
        return shell

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, ShardedVolume) for kind in types):
            return NotImplemented  # a volume knows what to do
        with without_subclass_overrides():
            if func in OUTLINE and not args[0].is_written:
                return func(*args, **(kwargs or {}))
            later = None if kwargs else _follow(func, args)
        return _call(func, args, kwargs or {}) if later is None else later

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:
        """Return all of it as a tensor of another class, for which torch asks no ``__torch_function__``."""
        return self.whole().as_subclass(cls)

    @property
    def is_written(self) -> bool:
        """Whether there is an ordinary tensor of it, or one that it is a view of: that may have been changed."""
        return self._whole is not None or (self.func in VIEWS and self.arguments[0].is_written)

    def whole(self) -> Tensor:
        """Return all of it, an ordinary tensor from now on."""
        if self._whole is None:
            # Whatever mode its reader is in: it was to be computed before.
            with without_overrides(), torch.inference_mode(False):
                if self.func in VIEWS:
                    with torch.enable_grad():
                        origin = self.arguments[0].whole()
                        # A leaf's views are leaves too, also of one that was told after them that it needs a gradient.
                        told = origin.is_leaf and origin.requires_grad
                        self._whole = self.func(origin.detach() if told else origin, *self.arguments[1:])
                        self._whole.requires_grad_(told or self._whole.requires_grad)
                else:
                    (self._whole,) = self._compute(lambda part: [part])
            self._own = None
        return self._whole

    def cut(self, dim: int, context: Context, merged: Merged | None) -> list[Tensor] | None:
        """Return the slabs of a volume of it that is cut along ``dim``; None where that is not how it is computed."""
        if self.is_written or dim != self.rows:
            return None
        if self.func in VIEWS:
            parent: Uncut = self.arguments[0]
            parts = parent.cut(parent.rows, context, merged)
            return None if parts is None else [self.func(part, *self.arguments[1:]) for part in parts]
        if self._own is None or self._own[0] is not context or self._own[1] != merged:
            found = self._compute(lambda part: from_whole(part, [0], context, merged).slabs)
            self._own = context, merged, found
        return self._own[2]

    def _compute(self, take: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Return what is computed of the rows that ``take`` leaves; no step is kept longer than torch would.

        Nothing that somebody was given is read: it may have been changed, and not every change is counted.
        """
        steps = self._list_steps()
        last = {id(given): step for step in steps for given in step._waiting()}
        found: dict[int, list[Tensor]] = {}

        def read(given: Any) -> Iterable[Any]:
            if type(given) is Uncut:
                return found[id(given)]
            return take(given) if isinstance(given, Tensor) else repeat(given)

        for step in steps:
            columns = [read(given) for given in step.arguments]
            with without_overrides(), torch.no_grad():  # what is computed here does not wait
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
            for given in step._waiting():
                visit(given)
            steps[id(step)] = step

        visit(self)
        return list(steps.values())

    def _waiting(self) -> "list[Uncut]":
        return [given for given in self.arguments if type(given) is Uncut]


def written(value: Any) -> Any:
    """Return nested arguments with ordinary tensors for those that wait."""
    return tree_map(lambda leaf: leaf.whole() if type(leaf) is Uncut else leaf, value)


def shown(value: Any) -> Any:
    """Return nested arguments with ordinary tensors for those that wait no longer: they may look otherwise by now."""
    return tree_map(lambda leaf: leaf.whole() if type(leaf) is Uncut and leaf.is_written else leaf, value)


def _call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function with ordinary tensors; what it changes in place has changed for whoever saved the shell, too."""
    shells = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is Uncut]
    versions = [_get_version(shell.whole()) for shell in shells]
    result = func(*written(args), **written(kwargs))
    for shell, version in zip(shells, versions, strict=True):
        if _get_version(shell.whole()) != version:
            increment_version(shell)
    return result


def _get_version(tensor: Tensor) -> int:
    with without_subclass_overrides():
        return get_version(tensor)


def note_cut(operand: Tensor, context: Context) -> None:
    """Note that an ordinary tensor is cut: if it is large, the next one shall wait."""
    if operand.numel() >= LARGE and not operand.requires_grad:
        context.cuts_large = True


def cut_later(context: Context) -> AbstractContextManager[Any]:
    """Let large tensors wait in here, in a network that has cut some."""
    return _Waits(context) if context.cuts_large and context.communicator.num_shards > 1 else nullcontext()


class _Waits(TorchFunctionMode):
    """Looks for differences that grow.

    Not in a block that the network itself checkpoints: that is computed again outside of here, as it was.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        later = _begin(func, args, self._context) if func in OUTER and not kwargs else None
        return func(*args, **(kwargs or {})) if later is None else later


def _begin(func: Callable, args: tuple, context: Context) -> Uncut | None:
    """Return a difference that waits; None of any other."""
    if len(args) != 2 or any(type(given) not in PLAIN_TENSORS for given in args) or _is_seen(context):
        return None
    first, second = args
    if first.is_nested or second.is_nested or first.ndim < 2 or first.ndim != second.ndim:
        return None
    if first.shape[0] != second.shape[0] or first.device != second.device:
        return None
    if not first.layout == second.layout == torch.strided:
        return None
    if first.requires_grad or second.requires_grad or first.is_inference() or second.is_inference():
        return None
    outline = _outline(func, args)
    least = max(LARGE, GROWTH * max(first.numel(), second.numel()))
    if outline.numel() < least:
        return None
    with torch.no_grad():
        return Uncut(func, [given.clone() for given in args], 0, outline)


def _is_seen(context: Context) -> bool:
    """Say whether somebody follows what is computed now by other means than its functions."""
    if torch.is_inference_mode_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    return find_transform() is not None or is_forward_mode() or saved_tensors_hooks() is not context.hooks


def _follow(func: Callable, args: tuple) -> Uncut | None:
    """Return what follows from tensors that wait, entry by entry; None of any other function."""
    given = [each for each in args if type(each) is Uncut]
    if (func not in EACH and func not in VIEWS) or type(args[0]) is not Uncut:
        return None
    alike = all(each.shape == args[0].shape and each.rows == args[0].rows and not each.is_written for each in given)
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
