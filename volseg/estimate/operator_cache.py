"""What operators return for tensors without values, remembered by what they were given.

A step that is followed asks torch for the same shapes again and again: in its second pass, in other candidates, on
other processes. Torch remembers results of its own, by keys that cost about as much as computing them, and not those
of operators that return several tensors. Here a key is sizes, strides, dtypes and devices, and the switches by which
torch chooses implementations; what is remembered is whether each result is new memory, a view of an argument, or an
argument itself.

Not remembered: a view of memory that several arguments share, for which of them it views cannot be told; what returns
numbers, changes the size of memory or writes into ``out=``, depends on values, or is no
operator of aten.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from volseg.device.fake_internals import FakeTensor, FakeTensorMode, make_like_fake
from volseg.device.torch_internals import (
    get_schema,
    get_storage_key,
    read_global_flags,
    without_dispatch,
    without_overrides,
)
from volseg.estimate.operator_work import by_operator

__all__ = ["OperatorCache"]

MOST = 1 << 17
"""Results to remember; a forecast of all candidates has a tenth of it."""

UNFIT_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)

UNFIT_NAMES = {"set_", "resize_", "resize_as_", "lift", "lift_fresh", "lift_fresh_copy"}
"""Which give a tensor other memory, or one with values some."""

Key = tuple[Any, ...]
Remake = Callable[["OperatorCache", Sequence[FakeTensor]], Any]

META = torch.device("meta")

PLAIN = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that a key holds as they are. To ask what is an instance of ``Tensor`` runs Python of torch's, a
microsecond or two for each argument."""


@dataclass(slots=True, eq=False)
class Known:
    """What is remembered of an operator that was given such arguments."""

    remake: Remake
    """Makes what it returns."""
    work: Any = None
    """What whoever asked has found out about it; it follows from the same."""


_known: dict[Key, Known] = {}
"""Of all steps that this process follows: what an operator returns depends on nothing else."""


class OperatorCache:
    """The results of operators, for one mode of tensors without values.

    Parameters
    ----------
    mode
        To which the tensors belong.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._alike: dict[torch.device, FakeTensor] = {}

    def make(self, memory: Tensor, device: torch.device) -> FakeTensor:
        """Return a tensor without values of a device."""
        like = self._alike.get(device)
        if like is None:
            with without_dispatch():
                like = self._alike[device] = FakeTensor(self._mode, torch.empty(0, device=META), device)
        return make_like_fake(like, memory)

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``function(*args, **kwargs)`` returns."""
        return self.find(function, args, kwargs)[0]

    def run_anew(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what it returns; torch's own memory, which all modes share, has no switches in its keys."""
        before, self._mode.cache_enabled = self._mode.cache_enabled, False
        try:
            return function(*args, **kwargs)
        finally:
            self._mode.cache_enabled = before

    def find(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Known | None]:
        """Return what it returns, and what is remembered of it; None where nothing is."""
        if not _may_be_known(function):
            return function(*args, **kwargs), None
        tensors: list[FakeTensor] = []
        key: list[Any] = [
            id(function),
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
            read_global_flags(),
        ]
        if not _describe(args, key, tensors) or (kwargs and not _describe(kwargs.items(), key, tensors)):
            return function(*args, **kwargs), None
        whole = tuple(key)
        known = _known.get(whole)
        if known is not None:
            return known.remake(self, tensors), known
        out = self.run_anew(function, args, kwargs)
        remake = _find_remake(out, tensors)
        if remake is None:
            return out, None
        if len(_known) >= MOST:
            _known.clear()
        known = _known[whole] = Known(remake)
        return out, known


@by_operator
def _may_be_known(function: Any) -> bool:
    """Say whether an operator's results follow from the sizes, strides, dtypes and devices of what it is given."""
    schema = get_schema(function)
    writes_out = any(each.is_out for each in schema.arguments)
    unfit = any(tag in UNFIT_TAGS for tag in function.tags) or function.overloadpacket.__name__ in UNFIT_NAMES
    return function.namespace == "aten" and not writes_out and not unfit


def _describe(values: Any, key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add what tells arguments from others to a key, and the tensors among them; say whether all can be told."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:  # 1, 1.0 and True are equal, and give other dtypes
            key += (kind, value)
        elif kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
            tensors.append(value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _describe(value, key, tensors):
                return False
        elif isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | dict | torch.Generator):
            return False
        else:
            key += (kind, value)
    return True


def _find_remake(out: Any, tensors: Sequence[FakeTensor]) -> Remake | None:
    """Return what makes such results again, given the tensors among the arguments; None where it is not known."""
    if type(out) is FakeTensor:
        return _find_remake_of_one(out, tensors)
    if type(out) not in (list, tuple):
        return None
    memory = {get_storage_key(tensor.untyped_storage()) for tensor in tensors}
    new = [get_storage_key(one.untyped_storage()) for one in out if type(one) is FakeTensor]
    new = [key for key in new if key not in memory]
    remakes = [(lambda *_: None) if one is None else _find_remake_of_one(one, tensors) for one in out]
    if len(set(new)) < len(new) or any(remake is None for remake in remakes):
        return None
    kind = type(out)
    return lambda known, given: kind([remake(known, given) for remake in remakes])  # type: ignore[misc]


def _find_remake_of_one(out: Any, tensors: Sequence[FakeTensor]) -> Remake | None:
    """Return what makes one tensor again."""
    if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
        return None
    same = [number for number, tensor in enumerate(tensors) if tensor is out]
    if len(same) == 1:  # whether gradients go to it or not
        return lambda known, given: given[same[0]]  # noqa: ARG005 (all are called alike)
    if out.requires_grad or out.dtype.is_complex:
        return None
    size, stride, dtype, device = tuple(out.shape), out.stride(), out.dtype, out.fake_device
    offset, whole = out.storage_offset(), out.untyped_storage()
    mine = get_storage_key(whole)
    owners = [n for n, tensor in enumerate(tensors) if get_storage_key(tensor.untyped_storage()) == mine]
    if len(owners) > 1:  # of these arguments; others of the same sizes may each have memory of their own
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
        with without_dispatch():
            plain = torch.empty_strided(size, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
        if offset or plain != whole.nbytes():  # more memory than its elements
            return None
    return remake
