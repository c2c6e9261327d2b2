"""What a network does to its own input: a first layer that works in place changes the caller's tensor.

On one device it does so with any network. On slabs it does where they lie in the caller's memory; elsewhere the change
is written back behind the forward pass, or refused where autograd would have to know of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import as_plain, get_storage_key
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["CutInput"]


class CutInput:
    """A caller's tensor, and the slabs that were cut from it."""

    def __init__(self, whole: Tensor, volume: ShardedVolume) -> None:
        self.whole, self.volume = whole, volume
        self._slabs = list(volume.slabs)
        self._unchanged = Unchanged(self._slabs)

    @classmethod
    def among(cls, given: Sequence[Any], cut: Sequence[Any]) -> "list[CutInput]":
        """Pair the leaves of a call's arguments with what was cut from them."""
        return [
            cls(whole, volume)
            for whole, volume in zip(given, cut, strict=True)
            if isinstance(volume, ShardedVolume) and volume is not whole
        ]

    def write_back(self) -> None:
        """Give the caller's tensor what the forward pass wrote into the slabs."""
        slabs = self.volume.slabs
        same = all(a is b for a, b in zip(slabs, self._slabs, strict=True))
        if same and self._unchanged.holds():
            return
        memory = get_storage_key(self.whole.untyped_storage())
        if same and all(get_storage_key(slab.untyped_storage()) == memory for slab in slabs):
            return
        if self.whole.requires_grad:
            raise UnsupportedOperatorError(
                f"the network changes its input of shape {tuple(self.whole.shape)} in place, and that input needs a "
                "gradient: the slabs on other devices are copies, of whose change autograd would not know. Pass "
                "input.clone(), or let the first layer work out of place (inplace=False)"
            )
        with torch.no_grad():
            as_plain(self.whole).copy_(self.volume.full_tensor())
