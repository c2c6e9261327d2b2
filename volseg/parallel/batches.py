"""Scatter a batch that one process of a spatial group loads: the others receive their slabs.

The description of the batch travels as JSON over gloo (a host-side message: the GPUs need not wait for it). The voxels
travel over the group's own backend, each slab only to its owner.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from volseg.errors import ParallelError
from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.processes.progress import exchange
from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.strategy import SpatialStrategy
from volseg.parallel.spatial.transport.communicator import narrow_to
from volseg.parallel.spatial.volume import ShardedVolume


def loads_batches(model: ModelParallel) -> bool:
    """Return whether this process loads batches for its spatial group."""
    return model.strategy.volumes.group_rank == 0


def scatter_batch(model: ModelParallel, batch: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give every process of the spatial group its slabs of a batch.

    Parameters
    ----------
    model
        Defines which processes share a volume, and how volumes are cut.
    batch
        Fields by name on the process for which ``loads_batches(model)``; None on the others. Tensors ``(B, C, D, H,
        W)`` are cut, other tensors are sent whole, other values must be JSON.

    Returns
    -------
    dict
        The batch, its volumes as sharded volumes on this process's devices. An empty mapping is sent too, and can
        mark the end.

    Raises
    ------
    ParallelError
        If the loading process passes no batch, another passes one, or a value can be neither cut nor sent.
    """
    strategy = model.strategy.volumes
    if not strategy.is_shared:
        return {name: strategy.cut(value) for name, value in _require_batch(batch).items()}
    source = strategy.group_rank == 0
    if not source and batch is not None:
        raise ParallelError(
            f"process {strategy.group_rank} of the spatial group passed a batch; only process 0 loads: pass None"
        )
    fields = _share_header(strategy, _require_batch(batch) if source else None)
    return {
        name: _receive(strategy, field, batch[name] if batch is not None else None) for name, field in fields.items()
    }


def slab_shape(model: ModelParallel, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of this process's first slab of a volume of ``shape``.

    Raises
    ------
    ParallelError
        If the volume is too thin to be cut.
    """
    strategy = model.strategy.volumes
    dims = strategy.dims_of(torch.Size(shape))
    if dims is None:
        raise ParallelError(
            f"a volume of shape {tuple(shape)} is too thin for a grid of {strategy.communicator.grid} shards; use fewer"
        )
    own = list(shape)
    for dim, (start, stop) in zip(dims, strategy.communicator.owned([shape[d] for d in dims])[0], strict=True):
        own[dim] = stop - start
    return tuple(own)


def from_slab(model: ModelParallel, slab: Tensor, shape: Sequence[int]) -> ShardedVolume:
    """Build a volume of ``shape`` from this process's slab, for volumes that no process could hold whole.

    Raises
    ------
    ParallelError
        If the shape of the slab differs from ``slab_shape``.
    """
    expected = slab_shape(model, shape)
    if tuple(slab.shape) != expected:
        raise ParallelError(
            f"this process owns a slab of shape {expected} of a volume of {tuple(shape)}, got {tuple(slab.shape)}"
        )
    strategy = model.strategy.volumes
    if len(strategy.communicator.devices) != 1:
        raise ParallelError(
            f"from_slab needs one device per process, but this process has {len(strategy.communicator.devices)} devices"
        )
    return ShardedVolume([slab], strategy.dims_of(torch.Size(shape)) or [], shape, strategy.context)


def _require_batch(batch: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if batch is None:
        raise ParallelError("the process that loads must pass a batch, got None")
    return batch


def _share_header(strategy: SpatialStrategy, batch: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the description of the loading process's batch: shapes and types of tensors, and other values."""
    fields = {
        name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Tensor)
        else {"value": value}
        for name, value in (batch or {}).items()
    }
    try:
        shared: dict[str, Any] = exchange(fields, strategy.message_group())[0]
    except TypeError as error:
        raise ParallelError(
            f"a field of the batch is neither a tensor nor JSON ({error}); remove it before scattering"
        ) from None
    return shared


def _receive(strategy: SpatialStrategy, field: dict[str, Any], value: Any) -> Any:
    if "value" in field:
        return field["value"]
    shape, dtype = torch.Size(field["shape"]), getattr(torch, field["dtype"])
    home = strategy.communicator.home
    dims = strategy.dims_of(shape) if len(shape) in (4, 5) else None
    if value is not None:
        value = value.as_subclass(Tensor).detach().to(home)
    if dims is None:
        whole = value.contiguous() if value is not None else torch.empty(shape, dtype=dtype, device=home)
        dist.broadcast(whole, strategy.first_process, group=strategy.group)
        return whole
    slab = _send_slabs(strategy, value, dims, shape, dtype)
    return ShardedVolume([slab], dims, shape, strategy.context)


def _send_slabs(
    strategy: SpatialStrategy, value: Tensor | None, dims: list[int], shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Send each slab of ``value`` to its owner; return this process's slab. ``value`` is None on receivers.

    Parameters
    ----------
    strategy
        Defines the processes and their slabs.
    value
        The whole tensor on the process that loads, None on the others.
    dims, shape, dtype
        The dims that are cut, and the shape and dtype of the whole tensor.
    """
    communicator, group = strategy.communicator, strategy.group
    assert group is not None
    layouts = [spans(shape[dim], count) for dim, count in zip(dims, communicator.grid, strict=True)]
    own = communicator.owned([shape[dim] for dim in dims])[0]
    if value is None:
        size = list(shape)
        for dim, (start, stop) in zip(dims, own, strict=True):
            size[dim] = stop - start
        slab = torch.empty(size, dtype=dtype, device=communicator.home)
        for request in dist.batch_isend_irecv([dist.P2POp(dist.irecv, slab, strategy.first_process, group)]):
            request.wait()
        return slab
    operations = []
    for number in range(1, communicator.num_shards):
        position = np.unravel_index(number, communicator.grid)
        owned = [layout[p] for layout, p in zip(layouts, position, strict=True)]
        piece = narrow_to(value, dims, owned).contiguous()
        operations.append(dist.P2POp(dist.isend, piece, dist.get_global_rank(group, number), group))
    # As one batched call: NCCL warns about single sends, and would open a communicator for each pair.
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return narrow_to(value, dims, own).clone()
