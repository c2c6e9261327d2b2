"""What autograd, modules and the user's loop ask of a tensor that is not arithmetic."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.operators.pointwise import cut_like
from volseg.parallel.sharding.table import handles, refuse
from volseg.parallel.sharding.volume import ShardedVolume, relaid, wrap

__all__ = ["backward", "metadata"]

METADATA = [
    "Tensor.size",
    "Tensor.dim",
    "Tensor.numel",
    "Tensor.nelement",
    "Tensor.ndimension",
    "Tensor.element_size",
    "Tensor.is_floating_point",
    "Tensor.is_complex",
    "Tensor.is_signed",
    "Tensor.get_device",
    "Tensor.is_contiguous",
    "numel",
    "is_floating_point",
    "is_complex",
    "Tensor.is_same_size",
]

FLAGS = [
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_mkldnn",
    "is_mps",
    "is_xpu",
    "is_vulkan",
    "is_nested",
    "layout",
    "names",
    "itemsize",
    "is_inference",
    "retains_grad",
    "output_nr",
    "_version",
    "is_ipu",
    "is_maia",
    "is_mtia",
]


@handles("Metadata and autograd", *METADATA, rehearse=False)
def metadata(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Answer from the shape of the whole volume, or from a slab where all slabs agree."""
    volume, *rest = args
    name = func.__name__
    if name == "size":
        dim = rest[0] if rest else kwargs.get("dim")
        return volume.shape if dim is None else volume.shape[dim]
    if name in ("dim", "ndimension"):
        return volume.ndim
    if name in ("numel", "nelement"):
        return volume.shape.numel()
    if name == "is_same_size":
        return volume.shape == rest[0].shape
    return func(volume.slabs[0], *rest, **kwargs)


@handles("Metadata and autograd", *(f"Tensor.{name}" for name in FLAGS), rehearse=False)
def flag(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Read a property of the slabs."""
    return func(args[0].slabs[0], *args[1:])


@handles("Metadata and autograd", "Tensor.data", rehearse=False)
def data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the voxels without their history."""
    volume = args[0]
    return wrap(volume, [slab.data for slab in volume.slabs])


@handles("Metadata and autograd", "Tensor.grad_fn", rehearse=False)
def grad_fn(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the first slab's history."""
    return args[0].slabs[0].grad_fn


@handles(
    "Metadata and autograd",
    "Tensor.requires_grad_",
    "Tensor.retain_grad",
    "Tensor.detach_",
    "Tensor.record_stream",
    rehearse=False,
)
def per_slab(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do it to each slab."""
    for slab in args[0].slabs:
        func(slab, *args[1:], **kwargs)
    return args[0]


@handles("Metadata and autograd", "Tensor.backward", rehearse=False)
def backward(func: Callable, input: Any, gradient: Any = None, retain_graph: bool | None = None) -> None:
    """Start the backward pass from a volume with the gradient of each voxel."""
    if gradient is None or not isinstance(input, ShardedVolume):
        refuse("backward() needs the gradient of each voxel, or a loss that is one number")
    gradient = relaid(gradient, input.merged) if isinstance(gradient, ShardedVolume) else cut_like(gradient, input)
    torch.autograd.backward(input.slabs, gradient.slabs, retain_graph=retain_graph)


@handles(
    "Metadata and autograd",
    "Tensor.new_zeros",
    "Tensor.new_ones",
    "Tensor.new_empty",
    "Tensor.new_full",
    "Tensor.new_tensor",
    rehearse=False,
)
def new_whole(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Make an ordinary tensor with the volume's dtype and home device."""
    volume, *rest = args
    like = torch.empty((), dtype=volume.dtype, device=volume.context.communicator.home)
    return func(like, *rest, **kwargs)


@handles("Metadata and autograd", "Tensor.__format__", rehearse=False)
def formatted(func: Callable, args: tuple, kwargs: dict[str, Any]) -> str:
    """Print the volume's description."""
    return repr(args[0])


@handles(
    "Metadata and autograd",
    "Tensor.numpy",
    "Tensor.__array__",
    "Tensor.tolist",
    "Tensor.item",
    "Tensor.__bool__",
    "Tensor.__float__",
    "Tensor.__int__",
    "Tensor.__index__",
    "Tensor.__complex__",
    "Tensor.__reduce_ex__",
    "Tensor.untyped_storage",
    "Tensor.storage",
    "Tensor.data_ptr",
    "Tensor.__dlpack__",
    "Tensor.share_memory_",
    "Tensor.__deepcopy__",
    rehearse=False,
)
def values(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Refuse to read or save values of which each shard has some."""
    name = func.__name__
    refuse(f"its voxels lie on {args[0].context.communicator.shards} shards: call full_tensor().{name}(...) instead")
