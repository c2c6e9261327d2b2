"""The values of small tensors that a step makes of numbers: class weights, which losses look at.

A step that is followed has no values, and one that looks at some cannot be followed. What somebody writes down as
numbers has values all the same: ``FocalLoss`` asks in every call whether one of its class weights is negative. So what
is made of such tensors alone, by operators that ask or convert, is computed beside, on the host.

Torch does the like for single numbers (``FakeTensor.constant``); what it computes by them lies on the host.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from volseg.device.torch_internals import FakeTensor, get_schema, without_dispatch
from volseg.forecast.kernel_work import list_tensors

__all__ = ["KnownValues"]

aten = torch.ops.aten

MOST = 256
"""Elements of a tensor whose values are kept: as many as classes, or channels."""

MADE = frozenset({aten.lift_fresh, aten.lift, aten.lift_fresh_copy})
"""What makes a tensor of numbers."""

ASKING = frozenset(
    {
        *(aten._to_copy, aten.clone),
        *(aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne, aten.isnan, aten.isinf, aten.isfinite),
        *(aten.logical_not, aten.logical_and, aten.logical_or, aten.abs),
        *(aten.any, aten.all, aten.min, aten.max, aten.sum),
    }
)
"""Operators with new results, by which code asks."""


class KnownValues:
    """Which tensors of a step have values, and what they are."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def read(self, tensor: Tensor) -> Any:
        """Return the value of a tensor of one element; None where it is not known."""
        value = self._known.get(tensor)
        return None if value is None else value.item()

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Put down what an operator did: a tensor that was made of numbers, asked about, or changed."""
        packet = function.overloadpacket
        if packet in MADE:
            if not isinstance(args[0], FakeTensor) and args[0].ndim:  # of single numbers torch knows by itself
                self._keep(out, args[0])
            return
        if not self._known:
            return
        if get_schema(function).is_mutable:
            for tensor in list_tensors((args, kwargs)):
                self._known.pop(tensor, None)
        elif packet in ASKING:
            tensors = list_tensors((args, kwargs))
            if all(tensor in self._known for tensor in tensors):
                self._compute(function, args, kwargs, out)

    def _compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = [self._known[value] if isinstance(value, Tensor) else value for value in args]
        on_host = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        with without_dispatch():
            self._keep(out, function(*given, **on_host))

    def _keep(self, tensor: Any, value: Any) -> None:
        if isinstance(tensor, FakeTensor) and isinstance(value, Tensor) and value.numel() <= MOST:
            self._known[tensor] = value
