"""One volume over many devices: spatial model parallelism for unmodified networks.

Every device holds a slab of the volume at every layer. The network's own ``forward`` runs once per process, on
``ShardedVolume`` objects, whose ``__torch_function__`` looks each torch function up in a table of handlers. A
handler works on ordinary tensors with ordinary autograd::

    net.forward --> torch function --> table --> handler --> slabs, one per shard of this process
                                                    |
                                                    +--> communicator: fetch planes, collect, gather, spread, cut
                                                         (devices of this process, or processes of a group)

The parts, from plan to effect:

- ``plan``: which shard owns which planes, a function of the size alone, so that volumes of one size are always cut
  alike; which input planes an operator's output planes need, and how many of them are the neighbours'. Convolution,
  transposed convolution, pooling, interpolation, slices and padding are this map and a few lines.
- ``transport``: the movements of planes with their gradients, between devices of one process or the processes of a
  group. There are *slabs*, whose gradients belong to one shard, and *whole* values, which everybody holds alike, and
  whose gradient is the full one everywhere. The halo of a slab is received around it, while other work goes on.
- ``volume``, ``context``, ``parameters``: the sharded volume, and what a network's volumes share.
- ``pending``: slabs that wait to be written, or that can be written again instead of being kept. ``lazy``: the norms
  that wait for their activation, the joins that wait for their convolution, the inputs of recomputed blocks.
- ``convolution``: a process's slab, with the halo received in place; several slabs where sums have one order.
- ``table``, ``operators``: which function is run on slabs, and how; ``dispatch`` takes a call there by ``signatures``
  (torch's names of its arguments), ``contract`` (what torch makes of its shapes) and ``copied_view`` (copies of what
  torch has as views); ``gathered``: functions on the whole volume.
- ``memory``: activations that are computed again, or wait in host memory.
- ``strategy``: what a user sees.

What may import what is a contract in ``pyproject.toml``: nothing that computes comes below a plan.

Where this refuses: a function without a handler raises. Nothing is run on what only looks like the volume, nothing
is approximated, and no level is too coarse: a volume with fewer planes than shards is computed whole by everybody.

Why not DTensor or PhysicsNeMo's ShardTensor: both sit below autograd, where each operator needs its backward rule
written again, in Python, and both return wrong or no results for stock medical networks. Above autograd the
backward pass is torch's own. Why not tracing: shapes and control flow stay the network's.
"""

from volseg.parallel.spatial.custom_function import pointwise_function
from volseg.parallel.spatial.strategy import Spatial, SpatialStrategy
from volseg.parallel.spatial.volume import ShardedVolume
from volseg.parallel.spatial.whole import whole

__all__ = ["ShardedVolume", "Spatial", "SpatialStrategy", "pointwise_function", "whole"]
