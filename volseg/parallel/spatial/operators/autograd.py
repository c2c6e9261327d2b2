"""Metadata, the backward pass, hooks and reading of values: functions of a volume that do no arithmetic."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import is_view, with_overrides
from volseg.parallel.spatial.lazy.bias import forget_vanishing
from volseg.parallel.spatial.operators.operands import cut_like
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, wrap

SIZES = ["size", "dim", "ndimension", "numel", "nelement", "is_same_size", "element_size", "itemsize"]
LAYOUTS = ["layout", "is_contiguous", "is_mkldnn", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr"]
DEVICES = ["get_device", "is_cpu", "is_ipu", "is_maia", "is_meta", "is_mps", "is_mtia", "is_vulkan", "is_xpu"]
NUMBERS = ["is_complex", "is_floating_point", "is_signed"]
HISTORY = ["grad_fn", "is_inference", "output_nr", "retains_grad", "_version"]

METADATA = [f"Tensor.{name}" for name in (*SIZES, *LAYOUTS, *DEVICES, *NUMBERS, *HISTORY, "__dir__")]
METADATA += ["numel", "is_floating_point", "is_complex"]


@handles("Metadata and autograd", *METADATA, rehearse=False, merged=True, rounded=True)
def metadata(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return metadata of the whole volume, or of its first slab where all slabs agree."""
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
    if name == "__dir__":
        return object.__dir__(volume)
    return func(volume.slabs[0], *rest, **kwargs)


@handles("Metadata and autograd", "Tensor.data", rehearse=False, merged=True)
def data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the voxels without their history."""
    volume = args[0]
    return wrap(volume, [slab.data for slab in volume.slabs])


EACH = ["Tensor.requires_grad_", "Tensor.detach_", "Tensor.retain_grad", "Tensor.record_stream"]


@handles("Metadata and autograd", *EACH, rehearse=False, merged=True, rounded=True)
def per_slab(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the method on each slab; return the volume if the method works in place."""
    volume = args[0]
    if func is Tensor.detach_ and any(is_view(slab) for slab in volume.slabs):
        refuse("its slabs are views of another tensor, which torch does not detach in place: use detach()")
    if func is Tensor.detach_:
        volume.context.write_waiting()
    if func is Tensor.retain_grad:
        _check_not_bypassed(volume)
    for slab in volume.slabs:
        func(slab, *args[1:], **kwargs)
    return volume if func.__name__.endswith("_") else None


@handles("Metadata and autograd", "Tensor.backward", rehearse=False, merged=True, rounded=True)
def backward(
    func: Callable, input: Any, gradient: Any = None, retain_graph: bool | None = None, inputs: Any = None
) -> None:
    """Start the backward pass from a volume with the gradient of each voxel."""
    backward_of_several(func, input, gradient, retain_graph, inputs=inputs)


@handles("Metadata and autograd", "autograd.backward", rehearse=False, merged=True, rounded=True)
def backward_of_several(
    func: Callable, tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, inputs: Any = None
) -> None:
    """Start the backward pass from volumes and ordinary tensors."""
    roots = _sequence(tensors)
    given = _gradients(roots, grad_tensors)
    leaves = None if inputs is None else _sequence(inputs)
    for leaf in leaves or ():
        if isinstance(leaf, ShardedVolume):
            _check_not_bypassed(leaf)
    wanted = None if leaves is None else _flat(leaves)
    with with_overrides():  # off in handlers; recomputed blocks and hooks need overrides
        torch.autograd.backward(_flat(roots), given, retain_graph=retain_graph, inputs=wanted)


def _sequence(tensors: Any) -> list[Any]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return list(tensors.values() if isinstance(tensors, dict) else tensors)


def _flat(tensors: Sequence[Any]) -> list[Tensor]:
    """Return the tensors, with each volume replaced by its slabs."""
    return [part for one in tensors for part in (one.slabs if isinstance(one, ShardedVolume) else [one])]


def _check_not_bypassed(volume: ShardedVolume) -> None:
    """Refuse the gradient of a volume that was computed together with its reader.

    The gradient bypasses a join that a convolution has read, a norm that an activation or a sum has included, a
    convolution that a norm has read without its bias, an upsampled volume that was read in float32, and scores that a
    product with values has included. Also refuse a volume for which torch may have returned its source: here these are
    two volumes.
    """
    if volume.is_perhaps_given:
        refuse(
            "whether torch copies the source or returns the source itself depends on the memory layout of the whole "
            "volume, and the gradient would then be the source's. Ask for the gradient of the source, or register the "
            "hook on it, before it is used"
        )
    if volume.is_bypassed:
        refuse(
            "its gradient is not computed, because it was computed together with its reader: a join with a "
            "convolution, a norm with an activation or a sum, a convolution's bias with a norm, an upsampled volume "
            "with a reader in float32, or attention scores with their product. Ask for the gradients of its inputs, or "
            "call register_hook() or retain_grad() before the volume is used"
        )


def _gradients(roots: list[Any], gradients: Any) -> list[Tensor | None]:
    """Return the gradient of each part of each root."""
    given = [None] * len(roots) if gradients is None else _sequence(gradients)
    found: list[Tensor | None] = []
    for root, gradient in zip(roots, given, strict=True):
        if not isinstance(root, ShardedVolume):
            found.append(gradient.full_tensor() if isinstance(gradient, ShardedVolume) else gradient)
            continue
        refuse_if(gradient is None, "it needs a gradient for each voxel: pass one, or call backward() on a scalar loss")
        if gradient.shape != root.shape:
            raise RuntimeError(
                f"the gradient has shape {tuple(gradient.shape)}, but the volume has shape {tuple(root.shape)}"
            )
        found += cut_like(gradient, root).slabs
    return found


@handles("Metadata and autograd", "Tensor.register_hook", rehearse=False, merged=True, rounded=True)
def register_hook(func: Callable, input: Any, hook: Callable[[Any], Any]) -> Any:
    """Call ``hook`` with the gradient of the whole volume; a gradient that it returns is used instead."""
    if not input.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")  # as torch does
    _check_not_bypassed(input)
    slabs, dims, shape, context, merged = input.slabs, input.dims, input.shape, input.context, input.merged
    refuse_if(
        len(slabs) > 1,
        "hooks on a volume with more than one slab are not supported: use retain_grad(), or one process per device",
    )

    def call(gradient: Tensor) -> Tensor | None:
        volume = ShardedVolume([gradient], dims, shape, context, merged)
        result = hook(volume)
        forget_vanishing(gradient)
        if result is None:
            return None
        if result.shape != shape:
            raise RuntimeError(f"a hook returned shape {tuple(result.shape)} for a gradient of shape {tuple(shape)}")
        return cut_like(result, volume).slabs[0]

    return func(slabs[0], call)


NEW = ["Tensor.new_zeros", "Tensor.new_ones", "Tensor.new_empty", "Tensor.new_full", "Tensor.new_tensor"]


@handles("Metadata and autograd", *NEW, rehearse=False, merged=True)
def new_whole(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return a new ordinary tensor with the volume's dtype, on its home device."""
    volume, *rest = args
    like = torch.empty((), dtype=volume.dtype, device=volume.context.communicator.home)
    return func(like, *rest, **kwargs)


@handles("Metadata and autograd", "Tensor.__format__", rehearse=False, merged=True)
def formatted(func: Callable, args: tuple, kwargs: dict[str, Any]) -> str:
    """Return the volume's description."""
    return repr(args[0])


CONVERTED = ["numpy", "tolist", "item", "__array__", "__dlpack__", "__dlpack_device__", "__deepcopy__", "__reduce_ex__"]
AS_NUMBERS = ["__bool__", "__complex__", "__float__", "__index__", "__int__", "__contains__"]
MEMORY = ["data_ptr", "storage", "storage_offset", "stride", "untyped_storage"]
SHARED = ["is_pinned", "is_shared", "pin_memory", "share_memory_"]

VALUES = [f"Tensor.{name}" for name in (*CONVERTED, *AS_NUMBERS, *MEMORY, *SHARED)]


@handles("Metadata and autograd", *VALUES, rehearse=False, merged=True)
def values(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Refuse to read or save the voxels' values, which are spread over the shards."""
    volume = next(value for value in args if isinstance(value, ShardedVolume))
    refuse(
        f"its voxels are on {volume.context.communicator.num_shards} shards: call full_tensor() first, or wrap the "
        f"function that reads them: volseg.parallel.whole(function)"
    )
