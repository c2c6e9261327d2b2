"""Detect in-place changes by version counters: the one module that compares them.

torch counts the in-place changes of a tensor, and refuses the gradient of a saved tensor that has changed since, but
only if it saves the tensor itself. It does not compare tensors that go through saved-tensor hooks. ``keep`` and
``take`` are hooks that compare; ``Watched`` compares without keeping a tensor.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Size, Tensor

from volseg.device.torch_internals import PLAIN_TENSORS, get_version, without_subclass_overrides
from volseg.errors import UnsupportedOperatorError


class Unchanged:
    """Tensors that must stay as they are."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = [get_version(tensor) for tensor in tensors]

    def including(self, *tensors: Tensor) -> "Unchanged":
        """Return these tensors and others, which must not change from now on."""
        return self.joined(Unchanged(tensors))

    def joined(self, other: "Unchanged") -> "Unchanged":
        """Return these tensors and those of another object, with the recorded versions."""
        both = Unchanged((*self._tensors, *other._tensors))
        both._versions = [*self._versions, *other._versions]
        return both

    def holds(self) -> bool:
        """Return whether no tensor was changed in place since."""
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
        f"a tensor of shape {tuple(shape)} that a gradient is computed from was changed in place after "
        "it was read (such as a parameter by an optimizer's step, or a volume by an operator with inplace=True); "
        "do that out of place, or after the backward pass"
    )
