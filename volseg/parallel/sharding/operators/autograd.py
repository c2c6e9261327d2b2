"""What autograd, modules and the user's loop ask of a tensor that is not arithmetic."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.operators.arguments import bound
from volseg.parallel.sharding.operators.pointwise import cut_like
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume

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


@handles("Metadata and autograd", *METADATA)
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


@handles("Metadata and autograd", *(f"Tensor.{name}" for name in FLAGS))
def flag(func: Callable, args: tuple, _kwargs: dict[str, Any]) -> Any:
    """Read a property of the slabs."""
    return func(args[0].slabs[0], *args[1:])


@handles("Metadata and autograd", "Tensor.data")
def data(_func: Callable, args: tuple, _kwargs: dict[str, Any]) -> Any:
    """Return the voxels without their history."""
    volume = args[0]
    return ShardedVolume([slab.data for slab in volume.slabs], volume.dims, volume.shape, volume.context)


@handles("Metadata and autograd", "Tensor.grad_fn")
def grad_fn(_func: Callable, args: tuple, _kwargs: dict[str, Any]) -> Any:
    """Return the first slab's history."""
    return args[0].slabs[0].grad_fn


@handles(
    "Metadata and autograd", "Tensor.requires_grad_", "Tensor.retain_grad", "Tensor.detach_", "Tensor.record_stream"
)
def per_slab(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do it to each slab."""
    for slab in args[0].slabs:
        func(slab, *args[1:], **kwargs)
    return args[0]


@handles("Metadata and autograd", "Tensor.backward")
def backward(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Start the backward pass from a volume with the gradient of each voxel."""
    given = bound("input gradient retain_graph create_graph", args, kwargs, gradient=None)
    volume, gradient = given["input"], given["gradient"]
    if gradient is None or not isinstance(volume, ShardedVolume) or given.get("inputs") is not None:
        unsupported(func, args, kwargs, "backward() needs the gradient of each voxel, or a loss that is one number")
    if not isinstance(gradient, ShardedVolume):
        gradient = cut_like(gradient, volume)
    torch.autograd.backward(volume.slabs, gradient.slabs, retain_graph=given.get("retain_graph"))


@handles(
    "Metadata and autograd",
    "Tensor.new_zeros",
    "Tensor.new_ones",
    "Tensor.new_empty",
    "Tensor.new_full",
    "Tensor.new_tensor",
)
def new_whole(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Make an ordinary tensor with the volume's dtype and home device."""
    volume, *rest = args
    like = torch.empty((), dtype=volume.dtype, device=volume.context.communicator.home)
    return func(like, *rest, **kwargs)


@handles("Metadata and autograd", "Tensor.__format__")
def formatted(_func: Callable, args: tuple, _kwargs: dict[str, Any]) -> str:
    """Print the volume's description."""
    return repr(args[0])
