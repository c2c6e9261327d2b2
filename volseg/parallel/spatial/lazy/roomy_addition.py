"""A sum of volumes as they are, in buffers with room: a convolution behind receives its halo there, and copies nothing.

Such are the residual blocks that have no norm in front of their sum.
"""

from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.device.layout import DIM
from volseg.parallel.spatial.transport.room import allocate_with_room
from volseg.parallel.spatial.volume import ShardedVolume, wrap

__all__ = ["add_with_room"]


def add_with_room(first: Any, second: Any) -> ShardedVolume | None:
    """Return the sum; None where the two are not alike, or nobody will want room around it.

    Parameters
    ----------
    first, second
        What is added.
    """
    if not isinstance(first, ShardedVolume) or not isinstance(second, ShardedVolume):
        return None
    context = first.context
    # Outside of the network second derivatives may be asked for.
    wanted = context.room > 0 and context.in_network and context.communicator.is_direct
    if not wanted or context.communicator.num_shards == 1 or first.dims != (DIM,) or first.ndim != 5:
        return None
    alike = first.shape == second.shape and first.dims == second.dims and first.dtype == second.dtype
    plain = first.merged is second.merged is None and first.dtype.is_floating_point
    # Several samples with room around each lie apart, which whoever reads no halo would copy.
    if not alike or not plain or second.context is not context or first.shape[0] != 1 or first.numel() == 0:
        return None
    pairs = zip(first.slabs, second.slabs, strict=True)
    return wrap(first, [_AddWithRoom.apply(*pair, context.room) for pair in pairs])


class _AddWithRoom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, room: int) -> Tensor:
        del ctx
        return torch.add(first, second, out=allocate_with_room(first, room))

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        del ctx
        return gradient, gradient, None
