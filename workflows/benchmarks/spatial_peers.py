"""PhysicsNeMo's ShardTensor on the same networks and slabs, for ``spatial.py``.

It has sharded forms of convolution, pooling, padding and group norm; instance and batch norm go through a gather, whose
backward pass fails (2.2.2), and so do MONAI's DynUNet and V-Net. ``Stack`` is what it can run.

References
----------
.. [1] NVIDIA PhysicsNeMo, ``physicsnemo.domain_parallel``, https://github.com/NVIDIA/physicsnemo
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Stack", "shard_tensor_step"]


class Stack(nn.Sequential):
    """Blocks of convolution, group norm and ReLU at one resolution, and a head."""

    def __init__(self, classes: int, blocks: int = 6, channels: int = 32) -> None:
        layers: list[nn.Module] = []
        for block in range(blocks):
            convolution = nn.Conv3d(channels if block else 1, channels, 3, padding=1)
            layers += [convolution, nn.GroupNorm(8, channels), nn.ReLU()]
        super().__init__(*layers, nn.Conv3d(channels, classes, 1))


def shard_tensor_step(
    net: nn.Module, image: Tensor, label: Tensor, shape: tuple[int, ...]
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the distributed network, and what computes the loss of this process's slabs, ``(1, 1, D / N, H, W)``.

    Parameters
    ----------
    net
        On this process's device, the same on all.
    image, label
        This process's planes, cut as ``torch.chunk`` cuts.
    shape
        Of the whole volume, ``(1, 1, D, H, W)``.
    """
    from physicsnemo.domain_parallel import ShardTensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module

    world = dist.get_world_size()
    mesh = init_device_mesh(image.device.type, (world,), mesh_dim_names=("domain",))
    model = distribute_module(net, mesh)
    cut: Any = ShardTensor.from_local(image, mesh, (Shard(2),), sharding_shapes="chunk", global_shape=shape)

    def loss() -> Tensor:
        with torch.autocast(image.device.type, torch.bfloat16):
            output = model(cut)
        return F.cross_entropy(output.to_local().float(), label[:, 0].long()) / world

    return model, loss
