"""A sum that includes the norms in front of it and the activation behind it, as in residual blocks.

``act(norm(x) + y)`` and ``act(norm(x) + norm(y))`` are one pass over memory forward and two backward, like a single
norm. The norms in the sum are not written in between, nor are their gradients.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device.first_order import LinearMap
from volseg.device.layout import DIM
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.parallel.spatial.lazy.norm import WaitingNorm, WaitingTerms, find_norm
from volseg.parallel.spatial.lazy.recipes import WaitingRepeat
from volseg.parallel.spatial.pending import PLAIN
from volseg.parallel.spatial.sources import Unchanged, outline_slab
from volseg.parallel.spatial.transport.pieces import allocate_with_room
from volseg.parallel.spatial.volume import ShardedVolume, defer, wrap

WIDTHS = {torch.float16, torch.bfloat16, torch.float32}


class WaitingSum(WaitingTerms):
    """A norm with its activation, if any, plus another norm or plain slabs, and an activation of the sum, if any.

    Parameters
    ----------
    norm
        The first term.
    other
        The second term.
    """

    def __init__(self, norm: WaitingNorm, other: WaitingNorm | list[Tensor]) -> None:
        self.context, self.other = norm.context, other
        self.norms = [norm, other] if isinstance(other, WaitingNorm) else [norm]
        self.columns = [norm.stand_ins, other.stand_ins if isinstance(other, WaitingNorm) else other]
        dtypes = [column[0].dtype for column in self.columns]
        is_mixed = dtypes[0] != dtypes[1]
        self.stand_ins = list(norm.stand_ins)
        if is_mixed:
            dtype = torch.promote_types(*dtypes)
            self.stand_ins = [outline_slab(slab.shape, dtype, slab.device) for slab in norm.stand_ins]
        # With room around each of several samples the volume is not contiguous, and a reader without a halo would copy
        # it. A sum of two types gets its room from the convolution behind, which casts the sum.
        self.room = 0 if is_mixed or len(norm.stand_ins[0]) > 1 else norm.room
        if isinstance(other, WaitingNorm):
            self.moment, self.unchanged = norm.moment.joined(other.moment), norm.unchanged.joined(other.unchanged)
        else:
            self.moment, self.unchanged = norm.moment, norm.unchanged.joined(Unchanged(other))

    def activate(self, activation: Activation, slope: Tensor | None = None) -> "WaitingSum | None":
        """Return the sum with an activation; None if it has one, the activation has a slope, or the modes changed.

        Parameters
        ----------
        activation, slope
            See ``Pending.activate``.
        """
        if self.outer != IDENTITY or slope is not None or not self.moment.is_now():
            return None
        taken = copy(self)
        taken.outer = activation
        return taken

    def end_block(self, volume: ShardedVolume) -> None:
        """Write the sum: while it waits, two slabs are kept instead of one."""
        self.settle(volume)

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Write norm, sum and activation one after another: with an activation, ``write`` keeps the added slabs."""
        if self.outer == IDENTITY or isinstance(self.other, WaitingNorm):
            self.settle(volume)
            return
        self.check()
        normed, _, _ = self.norms[0].write(())
        with self.moment.restored():
            rows = zip(normed, self.other, strict=True)
            volume._slabs = [self.outer.apply(first + second) for first, second in rows]
        volume.pending = PLAIN


def add_waiting(first: Any, second: Any) -> ShardedVolume | None:
    """Return a waiting sum that includes a waiting norm; None if neither term waits, or the terms differ in form.

    Parameters
    ----------
    first, second
        The terms.
    """
    waiting = _find_sum(first, second) or _find_sum(second, first)
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
    if are_volumes and first.dtype == second.dtype and first.hooks is None and first.origin is None:
        waiting = _find_sum(first, second)
    if waiting is None:
        return False
    first.pending = waiting
    increment_version(first)
    first.context.defer(first)
    second.is_bypassed = second.is_bypassed or isinstance(second.pending, WaitingNorm)
    return True


def _find_sum(first: Any, second: Any) -> WaitingSum | None:
    """Return the sum of a waiting norm and another volume, or None if they differ in form."""
    norm = find_norm(first, second)
    # One type, or two types whose sum is float32, as in the kernels.
    if norm is None or not (first.dtype == second.dtype or {first.dtype, second.dtype} <= WIDTHS):
        return None
    other = second.pending if isinstance(second.pending, WaitingNorm) else None
    if other is not None and not other.moment.is_now():
        return None
    return WaitingSum(norm, _read_slabs(second) if other is None else other)


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
