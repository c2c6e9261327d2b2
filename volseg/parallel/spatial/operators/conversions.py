"""Copies and conversions: another dtype, another layout, a volume filled with a value; the devices stay."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import get_base
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.copied_view import mark_copies
from volseg.parallel.spatial.lazy.attention import waits
from volseg.parallel.spatial.lazy.scores import cast
from volseg.parallel.spatial.operators.operands import rewrap, run_local
from volseg.parallel.spatial.operators.pointwise import pointwise
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, wrap

DTYPES = ["bfloat16", "bool", "byte", "char", "double", "float", "half", "int", "long", "short", "cfloat", "cdouble"]
NAMED = [*DTYPES, "cpu", "cuda"]


@handles("Copies and conversions", "Tensor.contiguous", rehearse=False)
def contiguous(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Make each slab contiguous; torch returns a contiguous slab itself, with its history even under ``no_grad``."""
    volume = args[0]
    if not torch.is_grad_enabled() and volume.requires_grad:
        for slab in volume.slabs:
            strides = slab.stride()
            apart = sorted(strides, reverse=True) == list(strides) or strides[1] == 1  # a view, or channels last
            if apart and func(slab, *args[1:], **kwargs) is not slab:
                refuse("under no_grad, copies of slabs in another layout would lose their history: call detach() first")
    result = pointwise(func, args, kwargs)
    if isinstance(result, ShardedVolume) and result is not volume:
        result.is_perhaps_given = True
    return result


@handles("Copies and conversions", "empty_like", "full_like", "ones_like", "zeros_like", rehearse=False, merged=True)
def filled_like(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a new volume of the same grid, with slabs on the same devices."""
    volume, *rest = args if args else (next(v for v in kwargs.values() if isinstance(v, ShardedVolume)),)
    _without_device(kwargs.get("device"), volume)
    named = {name: value for name, value in kwargs.items() if name != "device" and value is not volume}
    return wrap(volume, [func(slab, *rest, **named) for slab in volume.slabs])


@handles("Copies and conversions", *(f"Tensor.{name}" for name in NAMED), rehearse=False, merged=True)
def convert_by_name(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Convert to the dtype in the method's name; ``cpu`` and ``cuda`` return the volume, or refuse to move it."""
    if func not in (Tensor.cpu, Tensor.cuda):
        return convert(Tensor.to, (args[0], _read_dtype(func)), kwargs)
    # No slab moves, so the arguments device and non_blocking have no effect.
    layout = {name: value for name, value in kwargs.items() if name == "memory_format"}
    return convert(Tensor.to, (args[0], func.__name__), layout)


@cache
def _read_dtype(func: Callable) -> torch.dtype:
    found: torch.dtype = func(torch.empty(0)).dtype
    return found


@handles("Copies and conversions", "Tensor.to", "Tensor.type", rehearse=False, merged=True)
def convert(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Change the dtype or the layout; each slab stays on its device."""
    volume, *rest = args
    if not isinstance(volume, ShardedVolume):  # plain.to(sharded): its dtype and home device
        return volume.to(device=rest[0].context.communicator.home, dtype=rest[0].dtype)
    if func is Tensor.type and not rest and not kwargs:
        return volume.slabs[0].type()
    kept = [_without_device(value, volume) for value in rest]
    named = {key: value for key, value in kwargs.items() if key not in ("device", "other")}
    _without_device(kwargs.get("device"), volume)
    if "other" in kwargs:
        named["dtype"] = _without_device(kwargs["other"], volume)
    kept = [value for value in kept if value is not None]
    told = [*kept, *named.values()]
    if waits(volume) and func is Tensor.to and len(told) == 1 and isinstance(told[0], torch.dtype):
        later = cast(volume, told[0])
        if later is not None:
            return later
    if not told:  # a pending volume stays pending
        return volume
    slabs = [func(slab, *kept, **named) for slab in volume.slabs]
    same = all(new is old for new, old in zip(slabs, volume.slabs, strict=True))
    found = volume if same else wrap(volume, slabs)
    layouts = {value for value in told if isinstance(value, torch.memory_format)}
    if not layouts - {torch.preserve_format} or found.dtype != volume.dtype:
        return found
    # Whether torch copies depends on the memory layout of the whole volume, which is unknown here.
    laid = wrap(volume, found.slabs)
    laid.is_perhaps_given = True
    return mark_copies(laid, [volume], perhaps=True)


def _without_device(value: Any, volume: ShardedVolume) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    named_device = isinstance(value, str) and not value.startswith("torch.")
    if isinstance(value, torch.device) or named_device or (isinstance(value, int) and not isinstance(value, bool)):
        kind = "cuda" if isinstance(value, int) else torch.device(value).type
        if kind != volume.device.type:
            refuse(f"its slabs stay on their devices: call full_tensor().to({str(value)!r}) to move the whole volume")
        return None
    return value


@handles("Copies and conversions", "scatter", "Tensor.scatter_", merged=True)
def scatter(
    func: Callable, input: Any, dim: int, index: Any, src: Any = None, value: Any = None, reduce: Any = None
) -> Any:
    """Scatter along an uncut dim, as one-hot encoding does."""
    if not isinstance(index, ShardedVolume) or dim % index.ndim in index.dims:
        refuse("the index must be sharded, and dim must not be the cut dim")
    if any(input.shape[cut] != size for cut, size in zip(index.dims, index.sizes, strict=True)):
        refuse("input and index must have the same extent along the cut")
    written = func.__name__ == "scatter_"
    if written and isinstance(input, ShardedVolume) and (input.dims, input.merged) != (index.dims, index.merged):
        refuse("the volume that it writes into must be cut like the index")
    if written and not isinstance(input, ShardedVolume) and not _is_nobodys(input):
        refuse("it writes into an ordinary tensor that is a view or requires a gradient")
    if isinstance(src, Tensor) and any(src.shape[cut] != n for cut, n in zip(index.dims, index.sizes, strict=True)):
        refuse("src and index must have the same extent along the cut")
    if written and isinstance(input, ShardedVolume):
        input.context.change(input)
    settings = {} if reduce is None else {"reduce": reduce}
    like, results = run_local(func, (input, dim, index, value if src is None else src), settings, like=index)
    if written and isinstance(input, ShardedVolume):
        return input
    if written:
        # MONAI's one_hot scatters into a whole tensor and uses only the result, as most code does.
        input.resize_(0)
        input.__class__ = WrittenInto
    return rewrap(like, results)


def _is_nobodys(tensor: Tensor) -> bool:
    """Return whether writing to an ordinary tensor changes no other tensor and no history."""
    return type(tensor) is Tensor and get_base(tensor) is None and not tensor.requires_grad


class WrittenInto(Tensor):
    """A tensor that a volume was scattered into: the result is on the slabs, and this tensor is unreadable."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UnsupportedOperatorError(
            f"{getattr(func, '__name__', func)} reads a tensor into which a sharded volume was scattered in place: its "
            f"values are on the shards; use the result, as in y = y.scatter_(...)"
        )
