"""A sum that includes the norms in front of it and the activation behind it, as in residual blocks.

``act(norm(x) + y)`` and ``act(norm(x) + norm(y))`` are one pass over memory forward and two backward, like a single
norm. The norms in the sum are not written in between, nor are their gradients.

V-Net adds a norm in half precision to the repeated image in float32, and the sum is float32 as in the plain network: 64
bytes per voxel, computed from 36. Where memory matters most (``checkpoint="tiled"``) such a sum keeps only its recipe:
its reader and its backward pass write both terms, some planes at a time.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device.first_order import LinearMap
from volseg.device.layout import DIM
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.parallel.spatial.lazy.norm import Add, WaitingNorm, WaitingTerms, find_norm
from volseg.parallel.spatial.lazy.recipes import WaitingRepeat, recipe_of_kept
from volseg.parallel.spatial.pending import PLAIN
from volseg.parallel.spatial.sources import Recipe, outline_slab
from volseg.parallel.spatial.transport.pieces import allocate_with_room
from volseg.parallel.spatial.volume import ShardedVolume, defer, wrap

WIDTHS = {torch.float16, torch.bfloat16, torch.float32}


class WaitingSum(WaitingTerms):
    """A norm with its activation, if any, plus another norm or a volume, and an activation of the sum, if any.

    Parameters
    ----------
    norms
        The first term, and the second one if it is a norm.
    others
        The slabs of each volume that is joined in a second term that is not a norm.
    recipe, dtype
        Recipe and element type of such a term.
    tiles
        Number of pieces in which a slab is written by its readers, which keep only its recipe; None if it is kept.
    """

    may_cast = True

    def __init__(
        self,
        norms: Sequence[WaitingNorm],
        others: Sequence[Sequence[Tensor]] = (),
        recipe: Recipe | None = None,
        dtype: torch.dtype | None = None,
        tiles: int | None = None,
    ) -> None:
        first, *second = norms
        self.context, self.norms, self.moment, self.unchanged = first.context, norms, first.moment, first.unchanged
        for other in second:
            self.moment, self.unchanged = self.moment.joined(other.moment), self.unchanged.joined(other.unchanged)
        rows = [norm.recipe.rows for norm in norms]
        if recipe is not None:
            self.unchanged = self.unchanged.including(*chain.from_iterable(others), *recipe.tensors)
            rows.append(recipe.rows)
        self.columns = [*(norm.stand_ins for norm in norms), *others]
        types = {norm.write_terms.dtype for norm in norms} | ({dtype} if dtype is not None else set())
        is_mixed, total = len(types) > 1, reduce(torch.promote_types, types)
        self.stand_ins = self.likes = list(first.stand_ins)
        if is_mixed or tiles is not None:
            self.stand_ins = [outline_slab(slab.shape, total, slab.device) for slab in first.stand_ins]
            self.likes = [torch.empty_like(slab, dtype=total, device="meta") for slab in first.stand_ins]
        self.keeps_recipe = tiles is not None
        # Half of a tile: several tensors of this size and the sum's type exist at a time.
        planes = None if tiles is None else -(-min(slab.shape[DIM] for slab in first.stand_ins) // (2 * tiles))
        kinds = tuple(chain.from_iterable(norm.write_terms.norms for norm in norms))
        self.write_terms = Add(kinds, total, None if recipe is None else recipe.write, dtype, planes=planes)
        self.recipe = Recipe(tuple(tuple(chain(*row)) for row in zip(*rows, strict=True)), self.write_terms)
        # With room around each of several samples the volume is not contiguous, and a reader without a halo would copy
        # it. A sum of two types gets its room from the convolution behind, which casts the sum.
        self.room = 0 if is_mixed or self.keeps_recipe or len(first.stand_ins[0]) > 1 else first.room

    def activate(self, activation: Activation, slope: Tensor | None = None) -> "WaitingSum | None":
        """Return the sum with an activation; None if it has one, the activation has a slope, or the modes changed.

        Parameters
        ----------
        activation, slope
            See ``Pending.activate``.
        """
        if self.write_terms.activation != IDENTITY or slope is not None or not self.moment.is_now():
            return None
        taken = copy(self)
        taken.write_terms = replace(self.write_terms, activation=activation)
        taken.recipe = Recipe(self.recipe.rows, taken.write_terms)
        return taken

    def hold(self, volume: ShardedVolume) -> Recipe | None:
        """Leave a sum unwritten that is larger than its terms."""
        return self.spare(volume) if self.keeps_recipe else super().hold(volume)

    def end_block(self, volume: ShardedVolume) -> None:
        """Write the sum: while it waits, two slabs are kept instead of one."""
        if not self.keeps_recipe:
            self.settle(volume)

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Write norm, sum and activation one after another: with an activation, ``write`` keeps the added slabs."""
        if self.keeps_recipe or self.write_terms.activation == IDENTITY or len(self.norms) == 2:
            self.settle(volume)
            return
        self.check()
        normed, _ = self.norms[0].write(())
        with self.moment.restored():
            rows = zip(normed, self.columns[1], strict=True)
            volume._slabs = [self.write_terms.activation.apply(first + second) for first, second in rows]
        volume.pending = PLAIN


def add_waiting(first: Any, second: Any, tiles: int) -> ShardedVolume | None:
    """Return a waiting sum that includes a waiting norm; None if neither term waits, or the terms differ in form.

    Parameters
    ----------
    first, second
        The terms.
    tiles
        Number of pieces in which a slab is written by its readers if the sum is larger than its terms.
    """
    waiting = _find_sum(first, second, tiles) or _find_sum(second, first, tiles)
    if waiting is None:
        return None
    for volume in (first, second):
        volume.is_bypassed = volume.is_bypassed or isinstance(volume.pending, WaitingNorm)
    return defer(waiting, first.dims, first.shape, first.context)


def add_in_place(first: Any, second: Any) -> bool:
    """Add to a waiting norm in place, and return whether this was possible.

    Parameters
    ----------
    first
        The volume to change; no code has read it if its norm still waits.
    second
        The term to add.
    """
    waiting = None
    are_volumes = isinstance(first, ShardedVolume) and isinstance(second, ShardedVolume)
    # A sum of two types might not have the type of the changed volume.
    if are_volumes and first.dtype == second.dtype and first.origin is None:
        waiting = _find_sum(first, second)
    if waiting is None:
        return False
    first.pending = waiting
    increment_version(first)
    first.context.defer(first)
    second.is_bypassed = second.is_bypassed or isinstance(second.pending, WaitingNorm)
    return True


def _find_sum(first: Any, second: Any, tiles: int = 1) -> WaitingSum | None:
    """Return the sum of a waiting norm and another volume, or None if they differ in form."""
    norm = find_norm(first, second)
    # One type, or two types whose sum is float32, as in the kernels.
    if norm is None or not (first.dtype == second.dtype or {first.dtype, second.dtype} <= WIDTHS):
        return None
    if isinstance(second.pending, WaitingNorm):
        other = second.pending.moment
        # A parameter of both is trained for both, or frozen for both.
        alike = other.is_now() and other.trains_alike() and norm.moment.trains_alike()
        return WaitingSum([norm, second.pending]) if alike else None
    if tiles > 1 and has_fewer_digits(first.dtype, second.dtype):
        recipe = second.pending.spare(second)
        if recipe is not None:
            second.is_bypassed = second.is_bypassed or second.pending.parts is not None
            # With a recipe only the history of the slabs is used.
            return WaitingSum([norm], second.pending.parts or [second._slabs], recipe, second.dtype, tiles)
    slabs = _read_slabs(second)
    return WaitingSum([norm], [slabs], recipe_of_kept(slabs), second.dtype)


def has_fewer_digits(first: torch.dtype, second: torch.dtype) -> bool:
    """Return whether a norm's input of the first type takes less memory than its sum with the second type (half)."""
    return first.is_floating_point and second.is_floating_point and first.itemsize < second.itemsize


def _read_slabs(volume: ShardedVolume) -> list[Tensor]:
    """Return a volume's slabs; the slabs of a repeated image take the memory of one channel."""
    expanded = volume.pending.expand() if isinstance(volume.pending, WaitingRepeat) else None
    return volume.slabs if expanded is None else expanded


def add_with_room(first: Any, second: Any) -> ShardedVolume | None:
    """Return the sum of two ordinary volumes, with room around it; None if they differ in form or no room is needed.

    A convolution behind receives its halo there without a copy, in residual blocks with no norm before their sum.

    Parameters
    ----------
    first, second
        The terms.
    """
    if not isinstance(first, ShardedVolume) or not isinstance(second, ShardedVolume):
        return None
    context = first.context
    # Outside of the network second derivatives may be requested.
    wanted = context.room > 0 and context.in_network and context.communicator.is_direct
    if not wanted or context.communicator.num_shards == 1 or first.dims != (DIM,) or first.ndim != 5:
        return None
    alike = first.shape == second.shape and first.dims == second.dims and first.dtype == second.dtype
    plain = first.merged is second.merged is None and first.dtype.is_floating_point
    # With room around each of several samples the volume is not contiguous: a reader without a halo would copy it.
    if not alike or not plain or second.context is not context or first.shape[0] != 1 or first.numel() == 0:
        return None

    def add(own: Tensor, other: Tensor) -> Tensor:
        return torch.add(own, other, out=allocate_with_room(own, context.room))

    pairs = zip(first.slabs, second.slabs, strict=True)
    return wrap(first, [LinearMap.apply(add, lambda gradient: (gradient, gradient), *pair) for pair in pairs])
