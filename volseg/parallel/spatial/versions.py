"""Changes in place, told by versions: the one place where they are compared.

torch counts how often a tensor was changed in place, and refuses a gradient of what was changed since it was saved: but
only where it saves the tensor itself. What goes through saved-tensor hooks it does not compare. ``keep`` and ``take``
are hooks that do.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from volseg.device.torch_internals import get_version, without_subclass_overrides
from volseg.errors import UnsupportedOperatorError

__all__ = ["Kept", "Unchanged", "keep", "take"]


class Unchanged:
    """Tensors that must stay as they are."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = [get_version(tensor) for tensor in tensors]

    def including(self, *tensors: Tensor) -> "Unchanged":
        """Return these and others, which must stay as they are from now on."""
        return self.joined(Unchanged(tensors))

    def joined(self, other: "Unchanged") -> "Unchanged":
        """Return these and those of another, as they were."""
        both = Unchanged((*self._tensors, *other._tensors))
        both._versions = [*self._versions, *other._versions]
        return both

    def holds(self) -> bool:
        """Say whether none of them was changed in place since."""
        return [get_version(tensor) for tensor in self._tensors] == self._versions


class Kept(NamedTuple):
    """A tensor that autograd saved, and its version then."""

    tensor: Tensor
    version: int


def keep(tensor: Tensor) -> Kept:
    """Keep a tensor for the backward pass as it is: the first of two saved-tensor hooks."""
    with without_subclass_overrides():  # of the shell of a volume, which a checkpoint saves
        return Kept(tensor, get_version(tensor))


def take(kept: Kept) -> Tensor:
    """Return a tensor that was kept: the second hook.

    Raises
    ------
    UnsupportedOperatorError
        If it was changed in place since.
    """
    if keep(kept.tensor).version != kept.version:
        raise UnsupportedOperatorError(
            f"a tensor of shape {tuple(kept.tensor.shape)} that a gradient is computed from was changed in place after "
            "it was read (such as a parameter by an optimizer's step, or a volume by an operator with inplace=True); "
            "do that out of place, or after the backward pass"
        )
    return kept.tensor
