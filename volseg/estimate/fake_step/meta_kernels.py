"""Compute the results of operators on fake tensors by torch's kernels for the meta device.

A kernel for the meta device takes a tenth of the time of ``FakeTensorMode``, which runs torch's Python code. It reads
and returns meta tensors over the memory of the fake ones, so results that are views share the right memory.

``FakeTensorMode`` computes the result for tensors of the host or of several devices, and for an operator that changes
the shape of an argument, resizes memory, writes into ``out=``, depends on values, has no kernel for the meta device, or
is not in aten.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from volseg.device.fake_internals import FakeTensor, FakeTensorMode, make_like_fake
from volseg.device.torch_internals import get_schema, without_dispatch, without_overrides

UNFIT_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)

UNFIT_NAMES = {"set_", "resize_", "resize_as_", "lift", "lift_fresh", "lift_fresh_copy"}
"""Operators that give a tensor other memory, or that lift a tensor with values."""

UNFIT_ARGUMENTS = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, dict, torch.Generator)

CPU, META = torch.device("cpu"), torch.device("meta")


class MetaKernels:
    """Operators on the fake tensors of a mode.

    Parameters
    ----------
    mode
        Mode of the fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._alike: dict[torch.device, FakeTensor] = {}

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``function(*args, **kwargs)``."""
        tensors: list[FakeTensor] = []
        if _suits(function) and _collect(args, tensors) and (not kwargs or _collect(kwargs.values(), tensors)):
            devices = {tensor.fake_device for tensor in tensors}
            device = kwargs.get("device") or next(iter(devices), CPU)
            # The host's operators choose layouts by the switches of its libraries.
            if len(devices) <= 1 and device != CPU and not any(type(value) is torch.device for value in args):
                found = self._run_on_meta(function, args, kwargs, tensors, device)
                if found is not NotImplemented:
                    return found
        return function(*args, **kwargs)

    def _run_on_meta(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[FakeTensor],
        device: torch.device,
    ) -> Any:
        """Return the result for tensors of one device, or NotImplemented if the meta device has none."""
        with without_dispatch(), without_overrides():
            plain = {id(tensor): _view(tensor) for tensor in tensors}
            given = {name: _replace(value, plain) for name, value in kwargs.items()}
            if "device" in given:
                given["device"] = META
            try:
                out = function(*_replace(args, plain), **given)
            except RuntimeError:  # no such kernel, or wrong arguments: the mode finds another way, or raises
                return NotImplemented
        if not _is_plain(out):
            return NotImplemented
        return self._make_fake(out, {id(plain[id(tensor)]): tensor for tensor in tensors}, device)

    def _make_fake(self, out: Any, given: Mapping[int, FakeTensor], device: torch.device) -> Any:
        """Return a result with fake tensors; a meta tensor that was ``given`` becomes the argument that it stands for.

        An argument is returned whether gradients go to it or not.
        """
        if type(out) is Tensor:
            return given[id(out)] if id(out) in given else self._make(out, device)
        return type(out)([self._make_fake(one, given, device) for one in out]) if isinstance(out, list | tuple) else out

    def _make(self, memory: Tensor, device: torch.device) -> FakeTensor:
        like = self._alike.get(device)
        if like is None:
            with without_dispatch():
                like = self._alike[device] = FakeTensor(self._mode, torch.empty(0, device=META), device)
        return make_like_fake(like, memory)


@cache
def _suits(function: Any) -> bool:
    """Return whether an operator only reads and writes its arguments, and needs no values for its results' sizes."""
    writes_out = any(each.is_out for each in get_schema(function).arguments)
    unfit = any(tag in UNFIT_TAGS for tag in function.tags) or function.overloadpacket.__name__ in UNFIT_NAMES
    return function.namespace == "aten" and not writes_out and not unfit


def _collect(values: Any, tensors: list[FakeTensor]) -> bool:
    """Append the fake tensors among arguments to a list; return whether the meta device takes all arguments."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return False
            tensors.append(value)
        elif kind is list or kind is tuple:
            if not _collect(value, tensors):
                return False
        elif issubclass(kind, UNFIT_ARGUMENTS):
            return False
    return True


def _view(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the meta device over the memory of a fake tensor."""
    made = torch.empty(0, dtype=tensor.dtype, device=META)
    return made.set_(  # type: ignore[call-overload,no-any-return]
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _replace(values: Any, plain: Mapping[int, Tensor]) -> Any:
    """Return arguments with fake tensors replaced by plain tensors."""
    if type(values) is FakeTensor:
        return plain[id(values)]
    return type(values)([_replace(value, plain) for value in values]) if type(values) in (list, tuple) else values


def _is_plain(out: Any) -> bool:
    """Return whether a result has only dense real tensors and dtypes."""
    if type(out) is Tensor:
        return out.layout is torch.strided and not out.dtype.is_complex
    return all(map(_is_plain, out)) if type(out) in (list, tuple) else out is None or type(out) is torch.dtype
