"""What waiting slabs are written from: unchanged tensors, the modes of the call, and recipes.

torch counts the in-place changes of a tensor, and refuses the gradient of a saved tensor that has changed since, but
only if it saves the tensor itself. It does not compare tensors that go through saved-tensor hooks. ``keep`` and
``take`` are hooks that compare; ``Watched`` compares without keeping a tensor. No other module compares versions.

``Moment`` records the modes in which an operator was called, so that its slabs are written in the same modes. A
``Recipe`` writes slabs from tensors which are kept instead.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from volseg.device.torch_internals import PLAIN_TENSORS, get_version, without_subclass_overrides
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import saved_tensors_hooks


class Unchanged:
    """Tensors that must stay as they are."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = [get_version(tensor) for tensor in tensors]

    def including(self, *tensors: Tensor) -> "Unchanged":
        """Return a record of these tensors and more; from now on none of them may change."""
        return self.joined(Unchanged(tensors))

    def joined(self, other: "Unchanged") -> "Unchanged":
        """Return these tensors and those of another object, with the recorded versions."""
        both = Unchanged((*self._tensors, *other._tensors))
        both._versions = [*self._versions, *other._versions]
        return both

    def holds(self) -> bool:
        """Return whether no tensor was changed in place since it was recorded."""
        return [get_version(tensor) for tensor in self._tensors] == self._versions


class Kept(NamedTuple):
    """A tensor that autograd saved, and its version then."""

    tensor: Tensor
    version: int


def keep(tensor: Tensor) -> Kept:
    """Keep a tensor for the backward pass, with its version: the first of two saved-tensor hooks."""
    with without_subclass_overrides():  # of a volume's shell, which a checkpoint saves
        return Kept(tensor, get_version(tensor))


def take(kept: Kept) -> Tensor:
    """Return a kept tensor: the second hook.

    Raises
    ------
    UnsupportedOperatorError
        If it was changed in place since.
    """
    if keep(kept.tensor).version != kept.version:
        raise _changed(kept.tensor.shape)
    return kept.tensor


class Watched:
    """The version of a tensor without its memory, which can be freed.

    Parameters
    ----------
    tensor : Tensor
        The watched tensor.
    ends : bool
        Whether no other tensor can change it once it is gone: a volume's shell has no views.
    """

    __slots__ = ("_find", "_shape", "_version")

    def __init__(self, tensor: Tensor, *, ends: bool = False) -> None:
        with without_subclass_overrides():
            self._shape, self._version = tensor.shape, get_version(tensor)
            self._find: Callable[[], Tensor | None] = weakref.ref(tensor) if ends else _share_version(tensor)

    def check(self) -> None:
        """Raise `UnsupportedOperatorError` if it was changed in place since."""
        found = self._find()
        if found is not None and keep(found).version != self._version:
            raise _changed(self._shape)


def _share_version(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns a tensor with the version of this one."""
    if type(tensor) in PLAIN_TENSORS:  # others are kept: parameters live anyway
        tensor = tensor.detach()  # shares version and memory
        tensor.data = tensor.new_empty(0)  # leaves the version
    return lambda: tensor


def _changed(shape: Size) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"a tensor of shape {tuple(shape)} that the backward pass needs was changed in place after "
        "it was read (such as a parameter by an optimizer's step, or a volume by an operator with inplace=True); "
        "change it out of place, or after the backward pass"
    )


class Moment:
    """Modes in which an operator was called, for writing its slabs later."""

    __slots__ = ("_trained", "grad_enabled", "hooks", "inference")

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.grad_enabled = torch.is_grad_enabled()
        self.hooks = saved_tensors_hooks()
        self.inference = torch.is_inference_mode_enabled()
        self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]

    def including(self, *parameters: Tensor) -> "Moment":
        """Return the same moment for more parameters."""
        return self.joined(Moment(parameters))

    def joined(self, other: "Moment") -> "Moment":
        """Return the same moment, also for the parameters of another one."""
        more = copy(self)
        more._trained = [*self._trained, *other._trained]
        return more

    def is_now(self) -> bool:
        """Return whether gradients and saved tensors are handled as then, so that one autograd node can serve both."""
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return modes == (self.grad_enabled, self.inference) and saved_tensors_hooks() == self.hooks

    def trains_alike(self) -> bool:
        """Return whether the parameters are trained, or frozen, as then."""
        return all(parameter.requires_grad == trained for parameter, trained in self._trained)

    def restored(self) -> AbstractContextManager[None]:
        """Compute in the recorded modes within the block.

        The next operator may run under no_grad, or inside a checkpointed block that must not include this work; or a
        parameter may have been frozen or unfrozen in between.
        """
        now = saved_tensors_hooks()
        own = now is None or now == self.hooks
        # Once each: two norms of a sum may share parameters.
        found = {id(own): own for own, trained in self._trained if own.requires_grad != trained}
        changed = list(found.values())
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if own and not changed and modes == (self.grad_enabled, self.inference):
            return nullcontext()
        return self._restored(own, changed)

    @contextmanager
    def _restored(self, own: bool, changed: Sequence[Tensor]) -> Iterator[None]:
        hooks = nullcontext() if own else torch.autograd.graph.saved_tensors_hooks(keep, take)
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        try:
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad_enabled), hooks:
                yield
        finally:
            for parameter in changed:
                parameter.requires_grad_(not parameter.requires_grad)


Write = Callable[[Sequence[Tensor], Tensor, int], None]
"""Writes, from saved tensors, the planes of a slab that start at the given plane and fill ``out``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tensors, and a function that writes slabs from them.

    Attributes
    ----------
    rows
        The tensors of each slab.
    write
        Writes a slab from its row.
    """

    rows: tuple[tuple[Tensor, ...], ...]
    write: Write

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of all slabs."""
        return tuple(tensor for row in self.rows for tensor in row)


def outline_slab(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a slab's shape in the memory of one element."""
    return torch.empty_strided(shape, [0] * len(shape), dtype=dtype, device=device)


def split_rows(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Return rows of so many tensors each, from tensors that were saved in one sequence."""
    rest = iter(tensors)
    return [tuple(islice(rest, size)) for size in sizes]


class Asked(NamedTuple):
    """Which gradients of a convolution are wanted."""

    input: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, ctx: Any, count: int) -> "Asked":
        """Return which gradients an autograd function is asked for.

        It gets one argument, a weight for each of ``count`` slabs, ``ctx.num_biases`` biases, and the inputs.
        """
        first_input = 1 + count + ctx.num_biases
        needed = ctx.needs_input_grad
        return cls(any(needed[first_input:]), needed[1], any(needed[1 + count : first_input]))


def mask_asked(ctx: Any, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of the last arguments, None for those that are not wanted."""
    pairs = zip(ctx.needs_input_grad[-len(inputs) :], inputs, strict=True)
    return [value if asked else None for asked, value in pairs]


def add_in_float32(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return a total, None at first, plus a part, None where no gradient is wanted; half precision is widened."""
    if part is None:
        return total
    wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
    return wide if total is None else total + wide
