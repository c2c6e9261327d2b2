"""Cache the results of operators on fake tensors by their arguments.

A traced step asks torch for the same shapes again and again: in its second pass, in other candidates, on other
processes. A key holds sizes, strides, dtypes and devices; the cache stores whether each result is new memory, a view of
an argument, or an argument itself. The cache learns this from a run on tensors of the meta device, which takes a tenth
of the time of ``FakeTensorMode``.

``FakeTensorMode`` computes the result, uncached, for tensors of the host or of several devices, for a view of memory
that several arguments share (the viewed argument is unknown), and for an operator that returns numbers, resizes memory,
writes into ``out=``, depends on values, has no kernel for the meta device, or is not in aten.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from volseg.device.fake_internals import FakeTensor, FakeTensorMode, make_like_fake
from volseg.device.torch_internals import get_schema, get_storage_key, without_dispatch, without_overrides
from volseg.estimate.operator_work import by_operator

MOST = 1 << 17
"""Most results in the cache; an estimate of all candidates needs a tenth of them."""

UNFIT_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)

UNFIT_NAMES = {"set_", "resize_", "resize_as_", "lift", "lift_fresh", "lift_fresh_copy"}
"""Operators that give a tensor other memory, or that lift a tensor with values."""

UNFIT_ARGUMENTS = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, dict, torch.Generator)

Key = tuple[Any, ...]
Remake = Callable[["OperatorCache", Sequence[FakeTensor]], Any]

CPU, META = torch.device("cpu"), torch.device("meta")

PLAIN = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types that a key holds unchanged; ``isinstance(value, Tensor)`` runs torch's Python code for about 1 to 2 us."""


@dataclass(slots=True, eq=False)
class Known:
    """The cache entry of an operator and its arguments."""

    remake: Remake
    """Makes the operator's result."""
    work: Any = None
    """Kernel of the operator, and the GPU that runs it; None until `TracedStep` has computed them."""


_known: dict[Key, Known] = {}
"""Entries shared by all steps that this process traces: an operator's result depends only on the key."""


class OperatorCache:
    """The cached results of operators, for one mode of fake tensors.

    Parameters
    ----------
    mode
        Mode of the fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._alike: dict[torch.device, FakeTensor] = {}

    def make(self, memory: Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor of a device over the given memory."""
        like = self._alike.get(device)
        if like is None:
            with without_dispatch():
                like = self._alike[device] = FakeTensor(self._mode, torch.empty(0, device=META), device)
        return make_like_fake(like, memory)

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``function(*args, **kwargs)``."""
        return self.find(function, args, kwargs)[0]

    def find(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Known | None]:
        """Return the result of ``function(*args, **kwargs)`` and its cache entry, or None if it is not cached."""
        if not _may_be_known(function):
            return function(*args, **kwargs), None
        tensors: list[FakeTensor] = []
        key: list[Any] = [id(function), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not _describe(args, key, tensors) or (kwargs and not _describe(kwargs.items(), key, tensors)):
            return function(*args, **kwargs), None
        whole = tuple(key)
        known = _known.get(whole)
        if known is None:
            remake = _compute_remake(function, args, kwargs, tensors)
            if remake is None:
                return function(*args, **kwargs), None
            if len(_known) >= MOST:
                _known.clear()
            known = _known[whole] = Known(remake)
        return known.remake(self, tensors), known


@by_operator
def _may_be_known(function: Any) -> bool:
    """Return whether the sizes, strides, dtypes and devices of an operator's arguments determine its results."""
    schema = get_schema(function)
    writes_out = any(each.is_out for each in schema.arguments)
    unfit = any(tag in UNFIT_TAGS for tag in function.tags) or function.overloadpacket.__name__ in UNFIT_NAMES
    return function.namespace == "aten" and not writes_out and not unfit


def _describe(values: Any, key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Append arguments to a key, and their tensors to a list; return whether a key can hold all arguments."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
            tensors.append(value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _describe(value, key, tensors):
                return False
        elif kind not in PLAIN and isinstance(value, UNFIT_ARGUMENTS):
            return False
        else:  # 1, 1.0 and True are equal, but result in different dtypes
            key += (kind, value)
    return True


def _compute_remake(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[FakeTensor]
) -> Remake | None:
    """Run an operator on tensors of the meta device; return a function that remakes its results, or None.

    The mode computes the same results through torch's Python code, which takes ten times as long.
    """
    devices = {tensor.fake_device for tensor in tensors}
    device = kwargs.get("device") or next(iter(devices), CPU)
    if len(devices) > 1 or device == CPU or any(type(value) is torch.device for value in args):
        return None  # the host's operators choose layouts by the switches of its libraries
    with without_dispatch(), without_overrides():
        plain = {id(tensor): _view(tensor) for tensor in tensors}
        given = {name: _replace(value, plain) for name, value in kwargs.items()}
        if "device" in given:
            given["device"] = META
        try:
            out = function(*_replace(args, plain), **given)
        except RuntimeError:  # no such kernel, or wrong arguments: the mode finds another way, or raises
            return None
        return _find_remake(out, [plain[id(tensor)] for tensor in tensors], device)


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


def _find_remake(out: Any, tensors: Sequence[Tensor], device: torch.device) -> Remake | None:
    """Return a function that remakes results from the tensors among the arguments, or None if none is known."""
    if type(out) is Tensor:
        return _find_remake_of_one(out, tensors, device)
    if out is None or type(out) is torch.dtype:
        return lambda *_: out
    if type(out) not in (list, tuple):
        return None
    memory = {get_storage_key(tensor.untyped_storage()) for tensor in tensors}
    new = [get_storage_key(one.untyped_storage()) for one in out if type(one) is Tensor]
    new = [key for key in new if key not in memory]
    remakes = [_find_remake(one, tensors, device) for one in out]
    if len(set(new)) < len(new) or any(remake is None for remake in remakes):
        return None
    kind = type(out)
    return lambda known, given: kind([remake(known, given) for remake in remakes])  # type: ignore[misc]


def _find_remake_of_one(out: Tensor, tensors: Sequence[Tensor], device: torch.device) -> Remake | None:
    """Return a function that remakes one tensor, or None if none is known."""
    if out.layout is not torch.strided or out.dtype.is_complex:
        return None
    same = [number for number, tensor in enumerate(tensors) if tensor is out]
    if len(same) == 1:  # whether gradients go to it or not
        return lambda known, given: given[same[0]]  # noqa: ARG005 (all are called the same way)
    size, stride, dtype = tuple(out.shape), out.stride(), out.dtype
    offset, whole = out.storage_offset(), out.untyped_storage()
    mine = get_storage_key(whole)
    owners = [n for n, tensor in enumerate(tensors) if get_storage_key(tensor.untyped_storage()) == mine]
    if len(owners) > 1:  # other arguments of the same sizes may not share memory
        return None
    base = owners[0] if owners else None

    def remake(known: OperatorCache, given: Sequence[FakeTensor]) -> FakeTensor:
        with without_dispatch(), without_overrides():
            if base is None:
                made = torch.empty_strided(size, stride, dtype=dtype, device=META)
            else:
                made = torch.empty(0, dtype=dtype, device=META)
                made.set_(given[base].untyped_storage(), offset, size, stride)  # type: ignore[call-overload]
        return known.make(made, device)

    if base is None:
        plain = torch.empty_strided(size, stride, dtype=dtype, device=META).untyped_storage().nbytes()
        if offset or plain != whole.nbytes():  # its storage is larger than its elements
            return None
    return remake
