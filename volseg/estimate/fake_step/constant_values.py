"""Keep the values of small tensors that a step makes of numbers: class weights and lists of dims, which losses read.

Fake tensors have no values, so a step that reads values cannot be traced. Tensors made of literal numbers do have
values: ``FocalLoss`` checks in every call whether one of its class weights is negative, and most of MONAI's losses sum
over ``torch.arange(2, 5).tolist()``. So tensors that are computed only from numbers and from such tensors, by operators
that compare, convert or index, are also computed on the host.

Torch does the same for single numbers (``FakeTensor.constant``), as long as they stay on the host.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from volseg.device.fake_internals import FakeTensor
from volseg.device.torch_internals import get_schema, get_storage_key, without_dispatch
from volseg.estimate.operator_work import list_tensors

aten = torch.ops.aten

MOST = 256
"""Most elements of a tensor whose values are kept: enough for classes or channels."""

MADE = frozenset({aten.lift_fresh, aten.lift, aten.lift_fresh_copy})
"""Operators that make a tensor of numbers."""

COUNTED = frozenset({aten.arange, aten.full, aten.zeros, aten.ones, aten.linspace, aten.scalar_tensor, aten.eye})
"""Operators that make a tensor by a rule."""

ASKING = frozenset(
    {
        *(aten._to_copy, aten.clone),
        *(aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne, aten.isnan, aten.isinf, aten.isfinite),
        *(aten.logical_not, aten.logical_and, aten.logical_or, aten.abs),
        *(aten.any, aten.all, aten.min, aten.max, aten.sum),
        *(aten.unbind, aten.select, aten.slice, aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.expand),
        *(aten.detach, aten.alias, aten.stack, aten.cat),
    }
)
"""Operators that compare, convert or index: they return new tensors, or views of their arguments."""


class ConstantValues:
    """The known values of a step's tensors."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def read(self, tensor: Tensor) -> Any:
        """Return the value of a tensor of one element, or None if it is unknown."""
        value = self._known.get(tensor)
        if value is None:
            return None
        with without_dispatch():
            return value.item()

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Update the known values after an operator has made, read or changed tensors."""
        meaning = _find_meaning(function)
        if meaning == "made" and not isinstance(args[0], FakeTensor):
            self._keep(out, args[0])
        elif meaning == "counted" and isinstance(out, FakeTensor) and out.numel() <= MOST:
            self._compute(function, args, kwargs, out)
        elif meaning == "changing" and self._known:
            self._forget(list_tensors((args, kwargs)))
        elif meaning == "asking" and self._known and self._are_known(list_tensors((args, kwargs))):
            self._compute(function, args, kwargs, out)

    def _are_known(self, tensors: Sequence[Tensor]) -> bool:
        # Sizes first, as few tensors are this small: each look-up in the table makes one of torch's weak references,
        # which takes as long as everything else here.
        return bool(tensors) and all(tensor.numel() <= MOST and tensor in self._known for tensor in tensors)

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Drop the values of tensors that may have changed, and of all tensors that share their memory."""
        changed = {get_storage_key(tensor.untyped_storage()) for tensor in tensors if isinstance(tensor, FakeTensor)}
        for tensor in list(self._known):
            if get_storage_key(tensor.untyped_storage()) in changed:
                del self._known[tensor]

    def _compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        on_host = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        with without_dispatch():
            computed = function(*self._fill(args), **self._fill(on_host))
        for tensor, value in zip(list_tensors(out), list_tensors(computed), strict=True):
            self._keep(tensor, value)

    def _fill(self, values: Any) -> Any:
        """Return an operator's arguments with their tensors replaced by known values."""
        if isinstance(values, Tensor):
            return self._known[values]
        if isinstance(values, dict):
            return {name: self._fill(value) for name, value in values.items()}
        return type(values)(map(self._fill, values)) if isinstance(values, list | tuple) else values

    def _keep(self, tensor: Any, value: Any) -> None:
        if isinstance(tensor, FakeTensor) and isinstance(value, Tensor) and value.numel() <= MOST:
            self._known[tensor] = value


@cache
def _find_meaning(function: Any) -> str:
    """Return the effect of an operator on known values: made, counted, asking, changing or other."""
    kinds = {"made": MADE, "counted": COUNTED, "asking": ASKING}
    found = next((name for name, packets in kinds.items() if function.overloadpacket in packets), "other")
    return "changing" if found in ("asking", "other") and get_schema(function).is_mutable else found
