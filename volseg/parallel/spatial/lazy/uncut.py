"""Large ordinary tensors that wait until a volume shows which of their rows each shard needs.

A network computes the masks of its shifted windows as differences of small tensors, ``(windows, 1, N)`` minus
``(windows, N, 1)``, and each shard adds the masks of its own windows. Without waiting, every shard computes all masks,
in tensors as large as the attention scores, and then copies its own. Here such a difference waits, and so do pointwise
functions of it. When it meets a volume that is cut along its rows, each shard computes only its own rows.

Any other reader gets an ordinary tensor, as torch computes it, and can change only this tensor: the difference and its
functions are computed from small private copies. A tensor with a gradient never waits. A ``TorchFunctionMode`` looks
for such differences only in a network that has cut a large tensor before.
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

LARGE = 2**22
"""Smallest number of elements of a waiting tensor."""

GROWTH = 16
"""Smallest ratio of the elements of a waiting tensor to those of each operand."""

OUTER = frozenset({torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__})

SUMS: frozenset[Any] = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
"""Functions in which volumes meet a waiting tensor."""

VIEWS = frozenset({torch.unsqueeze, Tensor.unsqueeze})

EACH = frozenset(
    {torch.eq, torch.ne, Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__, torch.masked_fill, Tensor.masked_fill}
)

OUTLINE = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}
    | {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")}
)


class Uncut(Tensor):
    """A waiting tensor: a function of other tensors, in which each row can be computed by itself.

    Attributes
    ----------
    func, arguments
        The function that computes it, and its arguments: private ordinary tensors whose rows are dim 0, other waiting
        tensors, and numbers.
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
        """Return a waiting tensor with the shape and the dtype of ``outline``."""
        device = next(given.device for given in arguments if isinstance(given, Tensor))
        shell = make_wrapper_subclass(cls, outline.shape, dtype=outline.dtype, device=device)
        shell.func, shell.arguments, shell.rows = func, tuple(arguments), rows
        return shell

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, ShardedVolume) for kind in types):
            return NotImplemented  # the volume handles the function
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
        """Return the whole tensor in another class; torch calls no ``__torch_function__`` for this."""
        return self.whole().as_subclass(cls)

    @property
    def is_written(self) -> bool:
        """Whether it, or the tensor that it is a view of, exists as an ordinary tensor, which may have changed."""
        return self._whole is not None or (self.func in VIEWS and self.arguments[0].is_written)

    def whole(self) -> Tensor:
        """Return the whole tensor, which is an ordinary tensor from now on."""
        if self._whole is None:
            # Not in the reader's modes: the network called the function earlier.
            with without_overrides(), torch.inference_mode(False):
                if self.func in VIEWS:
                    with torch.enable_grad():
                        origin = self.arguments[0].whole()
                        # Views of a leaf are leaves too, even if the leaf got requires_grad after them.
                        told = origin.is_leaf and origin.requires_grad
                        self._whole = self.func(origin.detach() if told else origin, *self.arguments[1:])
                        self._whole.requires_grad_(told or self._whole.requires_grad)
                else:
                    (self._whole,) = self._compute(lambda part: [part])
            self._own = None
        return self._whole

    def cut(self, dim: int, context: Context, merged: Merged | None) -> list[Tensor] | None:
        """Return the tensor's slabs, cut along ``dim``; None if it is written, or its rows are along another dim."""
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
        """Return the tensor for the rows that ``take`` selects; each step is computed once.

        Tensors that other code has received are not read: they may have changed, and not every change is counted.
        """
        found: dict[int, list[Tensor]] = {}

        def compute(step: Uncut) -> list[Tensor]:
            if id(step) not in found:
                columns = [read(given) for given in step.arguments]
                found[id(step)] = [step.func(*row) for row in zip(*columns)]  # noqa: B905 (numbers have no end)
            return found[id(step)]

        def read(given: Any) -> Iterable[Any]:
            if type(given) is Uncut:
                return compute(given)
            return take(given) if isinstance(given, Tensor) else repeat(given)

        with without_overrides(), torch.no_grad():  # what is computed here does not wait
            return compute(self)


def written(value: Any) -> Any:
    """Return nested arguments with ordinary tensors in place of waiting ones."""
    return tree_map(lambda leaf: leaf.whole() if type(leaf) is Uncut else leaf, value)


def shown(value: Any) -> Any:
    """Return nested arguments with ordinary tensors in place of written ones, which may have changed since."""
    return tree_map(lambda leaf: leaf.whole() if type(leaf) is Uncut and leaf.is_written else leaf, value)


def _call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function with ordinary tensors; an in-place change also counts for code that saved the shell."""
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
    """Note that an ordinary tensor is cut: if it is large, later ones wait."""
    if operand.numel() >= LARGE and not operand.requires_grad:
        context.cuts_large = True


def cut_later(context: Context) -> AbstractContextManager[Any]:
    """Let large tensors wait within the context, in a network that has cut one before."""
    return _Waits(context) if context.cuts_large and context.communicator.num_shards > 1 else nullcontext()


class _Waits(TorchFunctionMode):
    """Looks for differences that are much larger than their operands.

    It skips blocks that the network itself checkpoints: they are recomputed outside of it, and must not change.
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
    """Return a waiting difference; None if torch should compute it now."""
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
    """Return whether an inference mode, trace, transform or hook observes the current computation."""
    if torch.is_inference_mode_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    return find_transform() is not None or is_forward_mode() or saved_tensors_hooks() is not context.hooks


def _follow(func: Callable, args: tuple) -> Uncut | None:
    """Return a waiting view or pointwise function of waiting tensors; None for any other function."""
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
    """Return a result without values; raise what torch raises."""
    outline: Tensor = func(*(_on_meta(each) if isinstance(each, Tensor) else each for each in args))
    return outline


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
