"""Spatial model parallelism: run unmodified networks on a volume cut over many devices.

Every device holds a slab of the volume at every layer. The network's own ``forward`` runs once per process, on
``ShardedVolume`` objects, whose ``__torch_function__`` looks each torch function up in a table of handlers. A
handler works on ordinary tensors with ordinary autograd::

    net.forward --> torch function --> table --> handler --> slabs, one per shard of this process
                                                    |
                                                    +--> communicator: fetch planes, collect, gather, spread, cut
                                                         (devices of this process, or processes of a group)

The parts, from plan to effect:

- ``plan``: the planes that each shard owns, a function of the size only, so that volumes of one size are cut in the
  same way; the input planes that an operator's output planes need, and the number of them on the neighbours.
  Convolution, transposed convolution, pooling, interpolation, slices and padding are this map and a few lines.
- ``transport``: the movements of planes with their gradients, between devices of one process or the processes of a
  group. The gradient of a *slab* belongs to one shard. A *whole* value is equal on every shard, and its gradient is
  the full one everywhere. The halo of a slab is received around the slab, while other work continues.
- ``volume``, ``context``: the sharded volume, and the state that a network's volumes share.
- ``pending``, ``sources``: slabs that wait to be written, or that are written again instead of being kept. ``lazy``:
  norms that wait for their activation, joins that wait for their convolution, inputs of recomputed blocks.
- ``convolution``: a process's slab, with the halo received in place; several slabs if sums have a fixed order.
- ``table``, ``operators``: the functions that run on slabs, and their handlers; ``dispatch`` takes a call there by
  ``signatures`` (torch's names of its arguments), a rehearsal (torch's shapes of its results) and ``copied_view``
  (copies where torch has views); ``gathered``: functions on the whole volume.
- ``memory``: activations that are recomputed, or wait in host memory.
- ``strategy``: the interface for users.

A contract in ``pyproject.toml`` limits the imports: a plan imports nothing that computes.

A function without a handler raises. No function runs on an object that only looks like the volume, no result is
approximated, and no level is too coarse: every shard computes a volume with fewer planes than shards whole.

Why not DTensor or PhysicsNeMo's ShardTensor: both work below autograd, where each operator needs its backward rule
written again in Python, and both return wrong or no results for stock medical networks. Above autograd, torch's own
backward pass runs. Why not tracing: shapes and control flow stay the network's own.
"""

from volseg.parallel.spatial.custom_function import pointwise_function, whole
from volseg.parallel.spatial.strategy import Spatial, SpatialStrategy
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["ShardedVolume", "Spatial", "SpatialStrategy", "pointwise_function", "whole"]
