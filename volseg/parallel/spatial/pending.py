"""State of a volume's slabs: to be written, written, shown or released; one protocol, four states.

A norm or a join is not computed when it is called, but once the next operator is known (*waiting*): an activation is
included, a convolution has its halo sent while the inner planes are still being written, any other operator gets the
slabs. Slabs that were written in this way have a *recipe*: how to write them again from tensors that are kept anyway.
An operator that keeps the recipe borrows the slabs and frees their memory (*released*), unless other code has read the
slabs and may still hold them (*shown*). ::

      activate
       +---+
       |   v   settle, lend          show
      Waiting --------------> Written ----> Shown
       | |                     |   ^         ^ ^
       | |             release |   | lend    | |
       | |   spare             v   |         | |
       | +------------------> Released -show-+ |
       +------------------- show --------------+

============= ======================== =========================== ================ =====================
event         Waiting                  Written                     Shown            Released
============= ======================== =========================== ================ =====================
activate      itself, activation       None                        None             None
              taken along, or None
settle        writes; sends the halo   nothing                     nothing          nothing
spare         Released unwritten [2]_  the recipe, if it holds     as Written       as Written
lend          writes; the slabs        the slabs                   the slabs        writes again; the slabs
show          writes; the slabs        the slabs                   the slabs        writes again; the slabs
release       nothing                  frees, if the recipe holds  nothing          nothing
find_recipe   writes; as Written [1]_  the recipe, if it holds     as Written       as Written
hold          as find_recipe [3]_      as find_recipe              as find_recipe   as find_recipe
end_block     nothing [4]_             nothing                     nothing          nothing
narrow        the slabs' history       the slabs' history          as Written       as Written [5]_
============= ======================== =========================== ================ =====================

.. [1] The input of a recomputed block returns its recipe, and stays unwritten: a join reads only the recipe.
.. [2] And the recipe; if the slabs can only be written whole, they are, and stay Written.
.. [3] Slabs larger than their recipe's tensors are spared.
.. [4] A sum is written: waiting after the block, it would keep both terms.
.. [5] For an unwritten sum, the history of its cast, if requested.

What is changed in place
    An in-place operator first writes all waiting slabs (``Context.change``), except a bias whose slabs were never read,
    and then has its slabs shown: it changes the values at the time of its call. Other changes show in the tensors'
    versions (see ``sources``). If the sources of a *waiting* slab have changed, this and every later read is refused.
    If the sources of a *written* or *shown* slab have changed, or the slab itself, the slab is right, and its recipe is
    no longer valid. If the sources of a *released* slab have changed, the slab is lost, and reads of it are refused.

Most volumes never wait: they begin as ``PLAIN``, which is written and has no recipe, and become ``PLAIN_SHOWN``. A
state holds tensors and no volume, since the volume holds the state: a cycle would delay the release of slabs.

This module is not part of ``lazy``: the volume needs the protocol, and the operators in ``lazy`` make volumes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from volseg.device.gpus import resize_memory
from volseg.device.norm.activation import Activation
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.sources import Recipe, Unchanged
from volseg.parallel.spatial.transport.halo import Halo, Wait

if TYPE_CHECKING:
    from volseg.parallel.spatial.volume import ShardedVolume


def build_meta_slabs(volume: "ShardedVolume") -> list[Tensor]:
    """Return shape, element type and layout of the slabs, on the meta device: also of slabs without memory."""
    pending, slabs = volume.pending, volume._slabs
    if isinstance(pending, Released) and pending.layout is not None:
        layout = pending.layout
        return [torch.empty(slab.shape, dtype=slab.dtype, device="meta", memory_format=layout) for slab in slabs]
    return [torch.empty_strided(slab.shape, slab.stride(), dtype=slab.dtype, device="meta") for slab in slabs]


class Pending(ABC):
    """State of a volume's slabs. Every event gets the volume, which holds the slabs and this state.

    Attributes
    ----------
    parts
        The slabs of each joined volume, if any: an operator can return a gradient for each. None once the join was
        shown: its readers may wait for its gradient, for example with a hook.
    """

    __slots__ = ()
    parts: list[list[Tensor]] | None = None

    def activate(self, activation: Activation, slope: Tensor | None = None) -> "Waiting | None":
        """Return the state with an activation included, or None if it cannot be included.

        Parameters
        ----------
        activation
            The activation.
        slope
            Slope of PReLU.
        """
        del activation, slope
        return None

    def settle(self, volume: "ShardedVolume", halos: Sequence[Halo] = ()) -> Wait | None:
        """Write waiting slabs; with ``halos``, start their exchange and return the function that waits for it."""
        del volume, halos
        return None

    def settle_apart(self, volume: "ShardedVolume") -> None:
        """Write waiting slabs before an in-place change of any tensor: values that torch drops must not be kept."""
        self.settle(volume)

    @abstractmethod
    def lend(self, volume: "ShardedVolume") -> list[Tensor]:
        """Return the slabs to an operator that calls ``release`` afterwards, and keeps the recipe instead."""

    @abstractmethod
    def show(self, volume: "ShardedVolume") -> list[Tensor]:
        """Return the slabs to any code: their memory is kept."""

    def release(self, volume: "ShardedVolume") -> None:
        """Free the slabs' memory if they can be written again and no other code has read them.

        The tensors stay: autograd knows them by their identity. So a skip that waits for its join, and a join that a
        frame of the network's ``forward`` still names, take no memory.
        """
        del volume

    @abstractmethod
    def find_recipe(self, volume: "ShardedVolume") -> Recipe | None:
        """Return how to write the slabs again, unless the sources have changed in place since."""

    def spare(self, volume: "ShardedVolume") -> Recipe | None:
        """Return the recipe to an operator that needs only the recipe and the history of the slabs."""
        return self.find_recipe(volume)

    def hold(self, volume: "ShardedVolume") -> Recipe | None:
        """Return the recipe to a block that is recomputed from it; write the slabs unless that takes more memory."""
        self.settle(volume)
        return volume.pending.find_recipe(volume)

    def narrow(self, volume: "ShardedVolume", dtype: torch.dtype) -> list[Tensor]:
        """Return the history of the slabs for an operator that reads the recipe, and casts the result.

        Its gradient may have the dtype of the cast, if the volume can represent a cast of itself.
        """
        del dtype
        return volume._slabs

    def end_block(self, volume: "ShardedVolume") -> None:
        """Write slabs at the end of a recomputed block, if they would keep more memory by waiting.

        After the block, autograd would keep their sources, as no checkpoint drops them.
        """
        del volume


class Waiting(Pending):
    """The slabs are still to be written.

    Attributes
    ----------
    stand_ins
        Tensors in the volume in place of its slabs, of their element type and on their devices.
    unchanged
        Sources of the slabs.
    """

    refusal: ClassVar[str] = (
        "the input of a norm or of a join, or the norm's weight, was changed in place before the result was used; do "
        "that out of place, or use the result before"
    )
    stand_ins: list[Tensor]
    unchanged: Unchanged

    @abstractmethod
    def settle(self, volume: "ShardedVolume", halos: Sequence[Halo] = ()) -> Wait | None:
        """Check the sources, and write the slabs."""

    def check(self) -> None:
        """Refuse to write from changed sources."""
        if not self.unchanged.holds():
            raise UnsupportedOperatorError(self.refusal)

    def lend(self, volume: "ShardedVolume") -> list[Tensor]:
        """Write the slabs and return them."""
        self.settle(volume)
        return volume._slabs

    def show(self, volume: "ShardedVolume") -> list[Tensor]:
        """Write the slabs and return them."""
        self.settle(volume)
        return volume.pending.show(volume)

    def find_recipe(self, volume: "ShardedVolume") -> Recipe | None:
        """Write the slabs and return the recipe."""
        self.settle(volume)
        return volume.pending.find_recipe(volume)


@dataclass(slots=True, eq=False)
class Written(Pending):
    """The slabs have memory, and only operators that borrowed them hold them.

    Attributes
    ----------
    recipe, unchanged
        How to write the slabs again, if known, and the sources that must be unchanged for it.
    """

    recipe: Recipe | None
    unchanged: Unchanged
    parts: list[list[Tensor]] | None = None

    def lend(self, volume: "ShardedVolume") -> list[Tensor]:
        """Return the slabs."""
        return volume._slabs

    def show(self, volume: "ShardedVolume") -> list[Tensor]:
        """Return the slabs."""
        volume.pending = PLAIN_SHOWN if self.recipe is None else Shown(self.recipe, self.unchanged)
        return volume._slabs

    def release(self, volume: "ShardedVolume") -> None:
        """Free the memory if the recipe is valid."""
        if self.find_recipe(volume) is None:
            return
        volume.pending = Released(self, [slab.untyped_storage().nbytes() for slab in volume._slabs], self.parts)
        for slab in volume._slabs:
            resize_memory(slab, 0)

    def find_recipe(self, volume: "ShardedVolume") -> Recipe | None:
        """Return the recipe if it is valid."""
        del volume
        return self.recipe if self.recipe is not None and self.unchanged.holds() else None


class Shown(Written):
    """The slabs have memory, and other code that has read them may hold them."""

    __slots__ = ()

    def show(self, volume: "ShardedVolume") -> list[Tensor]:
        """Return the slabs."""
        return volume._slabs

    def release(self, volume: "ShardedVolume") -> None:
        """Keep the memory for other code that has read it."""
        del volume


@dataclass(slots=True, eq=False)
class Released(Pending):
    """The slabs have no memory any more, or never had; ``written`` is their earlier and next state.

    Attributes
    ----------
    written
        State to which the slabs return.
    bytes
        Bytes of each slab's memory.
    parts
        See ``Pending``.
    layout
        Layout of slabs that are only outlines so far; None if they have one.
    cast
        Returns such slabs of another element type, for an operator whose gradient has that type, if possible.
    """

    written: Written
    bytes: list[int]
    parts: list[list[Tensor]] | None = None
    layout: torch.memory_format | None = None
    cast: Callable[[torch.dtype], list[Tensor]] | None = None

    def lend(self, volume: "ShardedVolume") -> list[Tensor]:
        """Write the slabs again and return them."""
        self._restore(volume)
        return volume._slabs

    def show(self, volume: "ShardedVolume") -> list[Tensor]:
        """Write the slabs again and return them."""
        self._restore(volume)
        return self.written.show(volume)

    def find_recipe(self, volume: "ShardedVolume") -> Recipe | None:
        """Return the recipe if it is valid."""
        return self.written.find_recipe(volume)

    def narrow(self, volume: "ShardedVolume", dtype: torch.dtype) -> list[Tensor]:
        """Return the history in another type if the outlined slabs have one."""
        if self.cast is None or dtype == volume.dtype:
            return volume._slabs
        volume.is_bypassed = True  # its own gradient is incomplete
        return self.cast(dtype)

    def _restore(self, volume: "ShardedVolume") -> None:
        recipe = self.find_recipe(volume)
        if recipe is None:
            raise UnsupportedOperatorError(
                "the source of a volume was changed in place before the volume was used again; change it out of place"
            )
        with torch.no_grad():
            for slab, size, row in zip(volume._slabs, self.bytes, recipe.rows, strict=True):
                if self.layout is not None:
                    whole = torch.empty(slab.shape, dtype=slab.dtype, device=slab.device, memory_format=self.layout)
                    recipe.write(row, whole, 0)
                    slab.data = whole  # the tensor that autograd knows
                    continue
                resize_memory(slab, size)
                # Through another tensor, so that the write does not count as an in-place change.
                out = torch.empty(0, dtype=slab.dtype, device=slab.device)
                out.set_(slab.untyped_storage(), slab.storage_offset(), slab.shape, slab.stride())
                recipe.write(row, out, 0)
        volume.pending = self.written


PLAIN = Written(None, Unchanged(()))
"""State of slabs that an operator has computed at once, without a recipe."""

PLAIN_SHOWN = Shown(None, Unchanged(()))
