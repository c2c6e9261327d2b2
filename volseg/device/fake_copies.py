"""Copy networks without values: the copied tensors have shape, dtype and layout, and are on the host."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from volseg.device.fake_internals import FakeTensor, FakeTensorMode
from volseg.device.torch_internals import without_dispatch_modes
from volseg.errors import FollowError


def copy_without_values(value: Any, mode: FakeTensorMode) -> Any:
    """Return a deep copy of a network, or of any object with tensors, with a mode's fake tensors.

    Raises
    ------
    FollowError
        For tensors that are more than a block of memory: sparse or quantized ones.
    """
    with without_dispatch_modes(), _Emptying(mode):
        return copy.deepcopy(value)


class copying_by_clones(TorchFunctionMode):  # noqa: N801 (a context, as torch names its own)
    """Let ``copy.deepcopy`` in this block use ``clone`` for tensors that torch cannot copy.

    These are fake tensors, and features of the last batch that a network keeps as attributes: they have a history,
    which the copy drops.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or (args[0].is_leaf and not isinstance(args[0], FakeTensor)):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


class _Emptying(TorchFunctionMode):
    """Copy tensors without their values: ``deepcopy`` calls this mode, for parameters through ``clone``."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone and not isinstance(args[0], FakeTensor):
            return self._empty(args[0])
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                empty = self._empty(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty) if is_parameter else empty
                memo[id(tensor)].requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))

    def _empty(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise FollowError(
                "a network on fake tensors must have strided tensors that are not quantized, got one of "
                f"{tensor.layout} and {tensor.dtype}, shape {tuple(tensor.shape)}; use ordinary parameters and "
                "buffers"
            )
        device = tensor.device if isinstance(tensor, FakeTensor) else "cpu"
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
