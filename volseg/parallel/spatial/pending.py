"""What is still to be done with a volume's slabs, or can be done again: one protocol, four states.

A norm or a join is not computed where it is called, but once the next operator is known (*waiting*): an activation is
taken along, a convolution gets its halo sent while the inner planes are still being written, anything else gets the
slabs. Slabs that were written so have a *recipe*: how to write them again from tensors that are kept anyway. An
operator that keeps the recipe borrows the slabs and gives their memory back (*released*), unless somebody else has seen
them, who may hold them still (*shown*). ::

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

.. [1] The input of a recomputed block says its recipe, and stays unwritten: a join reads the recipe alone.
.. [2] And the recipe; where it can only be written as a whole it is, and stays Written.
.. [3] What is larger than its recipe's tensors is spared.
.. [4] A sum is written: waiting behind the block it would keep both of what is added.
.. [5] Of an unwritten sum that of its cast, if asked for.

What is changed in place
    An operator that works in place lets everything that waits be written first (``Context.change``), but a bias, whose
    slabs nobody has seen, and then has the slabs shown: it changes what was there when it was called. Everything else
    shows in the tensors' versions (see ``versions``). What a *waiting* slab is written from has changed: refused, now
    and at every later try. What a *written* or *shown* slab was written from has changed, or the slab itself: the slab
    is right, and its recipe does not hold any more. What a *released* slab was written from has changed: the slab is
    lost, and whoever asks for it is refused.

Most volumes never wait: they begin as ``PLAIN``, which is written and has no recipe, and become ``PLAIN_SHOWN``. A
state holds tensors and no volume, which holds its state: nobody waits for a garbage collector to free a slab.

This is no part of ``lazy``: the volume stands on the protocol, and the operators that wait make volumes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from volseg.device.gpus import resize_memory
from volseg.device.norm.activation import Activation
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.recipe import Outline, Recipe
from volseg.parallel.spatial.transport.halo import Halo, Wait
from volseg.parallel.spatial.versions import Unchanged

if TYPE_CHECKING:
    from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["PLAIN", "PLAIN_SHOWN", "Pending", "Released", "Shown", "Waiting", "Written", "find_likes"]


def find_likes(volume: "ShardedVolume") -> list[Tensor]:
    """Return shape, element type and layout of the slabs, on the meta device: also of those that have no memory."""
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
        The slabs of each volume that is joined, if some are: an operator can hand each its own gradient. None once
        the join was shown: who has seen it may wait for its gradient, by a hook for example.
    """

    __slots__ = ()
    parts: list[list[Tensor]] | None = None

    @property
    def reads_messages(self) -> bool:
        """Whether the slabs will be written from what other processes send, before anything is changed in place."""
        return False

    def activate(self, activation: Activation, slope: Tensor | None = None) -> "Waiting | None":
        """Return the state with an activation behind it, or None where none can be taken along.

        Parameters
        ----------
        activation
            Which.
        slope
            PReLU's.
        """
        del activation, slope
        return None

    def settle(self, volume: "ShardedVolume", halos: Sequence[Halo] = ()) -> Wait | None:
        """Write what waits; with ``halos``, start their exchange and return the function that waits for it."""
        del volume, halos
        return None

    def settle_apart(self, volume: "ShardedVolume") -> None:
        """Write what waits before any tensor is changed in place: what torch would not keep must not be kept then."""
        self.settle(volume)

    def wait_for_readers(self) -> None:  # noqa: B027  (most read no messages)
        """Write what reads messages only when it is read: the forward pass is over, and nobody else may have it."""

    def settle_with_history(self, volume: "ShardedVolume") -> None:
        """Write what waits before any tensor loses its history."""
        self.settle(volume)

    @abstractmethod
    def lend(self, volume: "ShardedVolume") -> list[Tensor]:
        """Return the slabs to an operator that calls ``release`` behind, and keeps the recipe instead of the slab."""

    @abstractmethod
    def show(self, volume: "ShardedVolume") -> list[Tensor]:
        """Return the slabs to anybody: their memory stays."""

    def release(self, volume: "ShardedVolume") -> None:
        """Give the slabs' memory back where they can be written again and nobody else has seen them.

        The tensors stay: autograd knows them by their identity. A skip that waits for its join, and a join that a frame
        of the network's ``forward`` still names, take no memory so.
        """
        del volume

    @abstractmethod
    def find_recipe(self, volume: "ShardedVolume") -> Recipe | None:
        """Return how to write the slabs again, unless something was changed in place since."""

    def spare(self, volume: "ShardedVolume") -> Recipe | None:
        """Return the recipe to an operator that needs no more of the slabs than that, and their history."""
        return self.find_recipe(volume)

    def hold(self, volume: "ShardedVolume") -> Recipe | None:
        """Return the recipe to a block that is recomputed from it; write the slabs unless that would take more."""
        self.settle(volume)
        return volume.pending.find_recipe(volume)

    def narrow(self, volume: "ShardedVolume", dtype: torch.dtype) -> list[Tensor]:
        """Return the history of the slabs for an operator that reads the recipe, and casts what it reads.

        Its gradient may come in the type that it casts to, where the volume can stand for a cast of itself.
        """
        del dtype
        return volume._slabs

    def end_block(self, volume: "ShardedVolume") -> None:
        """Write, at the end of a block that is recomputed, what would keep more by waiting than its slabs take.

        Behind the block autograd would keep what it is written from, as it keeps what no checkpoint forgets.
        """
        del volume


class Waiting(Pending):
    """The slabs are still to be written.

    Attributes
    ----------
    stand_ins
        What the volume holds instead of its slabs, of their element type and on their devices.
    room
        Planes of room to leave around each slab (see ``transport.room``), or more where a wider halo comes.
    unchanged
        What the slabs are written from.
    """

    refusal: ClassVar[str] = (
        "the input of a norm or of a join, or the norm's weight, was changed in place before the result was used; do "
        "that out of place, or use the result before"
    )
    stand_ins: list[Tensor]
    room: int
    unchanged: Unchanged

    @abstractmethod
    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Return the slabs, how to write them again, and the wait for ``halos``; there are none without room."""

    def outline(self) -> Outline | None:
        """Return the slabs without memory, with their history, and how to write them; None where nobody can."""
        return None

    def outline_in(self, dtype: torch.dtype) -> list[Tensor] | None:
        """Return other such slabs, of another element type: what reads them has a gradient of that type."""
        del dtype
        return None

    def check(self) -> None:
        """Refuse to write from what was changed."""
        if not self.unchanged.holds():
            raise UnsupportedOperatorError(self.refusal)

    def settle(self, volume: "ShardedVolume", halos: Sequence[Halo] = ()) -> Wait | None:
        """Write the slabs."""
        self.check()
        slabs, recipe, wait = self.write(halos if self.room else ())
        volume._slabs = slabs
        volume.pending = PLAIN if recipe is None else Written(recipe, Unchanged((*slabs, *recipe.tensors)), self.parts)
        return wait

    def spare(self, volume: "ShardedVolume") -> Recipe | None:
        """Leave the slabs unwritten, and without memory, where there is a recipe."""
        self.check()
        outlined = self.outline()
        if outlined is None:
            return self.find_recipe(volume)
        volume._slabs, recipe = outlined.slabs, outlined.recipe
        written = Written(recipe, Unchanged((*volume._slabs, *recipe.tensors)), self.parts)
        volume.pending = Released(written, [0] * len(volume._slabs), self.parts, outlined.layout, self)
        return recipe

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
    """The slabs are there, and nobody holds them but operators that borrowed them.

    Attributes
    ----------
    recipe, unchanged
        How to write the slabs again, if that is known, and what must have stayed as it was then.
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
        """Give the memory back where the recipe holds."""
        if self.find_recipe(volume) is None:
            return
        volume.pending = Released(self, [slab.untyped_storage().nbytes() for slab in volume._slabs], self.parts)
        for slab in volume._slabs:
            resize_memory(slab, 0)

    def find_recipe(self, volume: "ShardedVolume") -> Recipe | None:
        """Return the recipe if it holds."""
        del volume
        return self.recipe if self.recipe is not None and self.unchanged.holds() else None


class Shown(Written):
    """The slabs are there, and whoever has seen them may hold them."""

    __slots__ = ()

    def show(self, volume: "ShardedVolume") -> list[Tensor]:
        """Return the slabs."""
        return volume._slabs

    def release(self, volume: "ShardedVolume") -> None:
        """Leave the memory to whoever has seen it."""
        del volume


@dataclass(slots=True, eq=False)
class Released(Pending):
    """The slabs' memory was given back, or never taken; ``written`` is the state that they had and get again.

    Attributes
    ----------
    written
        See above.
    bytes
        Of each slab's memory.
    parts
        See ``Pending``.
    layout
        In which slabs are to lie that are an outline so far; None where they have a layout.
    waiting
        What was outlined, if anything was.
    """

    written: Written
    bytes: list[int]
    parts: list[list[Tensor]] | None = None
    layout: torch.memory_format | None = None
    waiting: Waiting | None = None

    def lend(self, volume: "ShardedVolume") -> list[Tensor]:
        """Write the slabs again and return them."""
        self._restore(volume)
        return volume._slabs

    def show(self, volume: "ShardedVolume") -> list[Tensor]:
        """Write the slabs again and return them."""
        self._restore(volume)
        return self.written.show(volume)

    def find_recipe(self, volume: "ShardedVolume") -> Recipe | None:
        """Return the recipe if it holds."""
        return self.written.find_recipe(volume)

    def narrow(self, volume: "ShardedVolume", dtype: torch.dtype) -> list[Tensor]:
        """Return the history in another type where what was outlined has one."""
        found = None if self.waiting is None or dtype == volume.dtype else self.waiting.outline_in(dtype)
        if found is None:
            return volume._slabs
        volume.is_bypassed = True  # its own gradient is not all of it
        return found

    def _restore(self, volume: "ShardedVolume") -> None:
        recipe = self.find_recipe(volume)
        if recipe is None:
            raise UnsupportedOperatorError(
                "what a volume was computed from was changed in place before the volume was used again; do that out of "
                "place"
            )
        with torch.no_grad():
            for slab, size, row in zip(volume._slabs, self.bytes, recipe.rows, strict=True):
                if self.layout is not None:
                    whole = torch.empty(slab.shape, dtype=slab.dtype, device=slab.device, memory_format=self.layout)
                    recipe.write(row, whole, 0)
                    slab.data = whole  # the tensor that autograd knows
                    continue
                resize_memory(slab, size)
                # Through another tensor, so that it does not count as a change in place.
                out = torch.empty(0, dtype=slab.dtype, device=slab.device)
                out.set_(slab.untyped_storage(), slab.storage_offset(), slab.shape, slab.stride())
                recipe.write(row, out, 0)
        volume.pending = self.written


PLAIN = Written(None, Unchanged(()))
"""Of slabs that an operator has made at once: there is nothing to write them again from."""

PLAIN_SHOWN = Shown(None, Unchanged(()))
