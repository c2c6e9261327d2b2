"""All private names of torch's modules that this package uses.

``torch_internals`` has those of torch itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, dropout, loss
from torch.nn.modules import module as _of_all_modules

NormBase = batchnorm._NormBase
ConvNd = conv._ConvNd
DropoutNd = dropout._DropoutNd
Loss = loss._Loss

PARAMETERS, BUFFERS, MODULES, NOT_PERSISTENT = "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"
"""Attributes of a module: its own parameters, buffers and children by name, and the buffers that are not saved."""

FORWARD_HOOKS, FORWARD_PRE_HOOKS = "_forward_hooks", "_forward_pre_hooks"
BACKWARD_HOOKS, BACKWARD_PRE_HOOKS = "_backward_hooks", "_backward_pre_hooks"
"""Attributes of a module: its hooks by number; the backward ones None on a tensor without any."""

FORWARD_HOOKS_WITH_KWARGS = "_forward_hooks_with_kwargs"
FORWARD_PRE_HOOKS_WITH_KWARGS = "_forward_pre_hooks_with_kwargs"
FORWARD_HOOKS_ALWAYS_CALLED = "_forward_hooks_always_called"
"""Attributes of a module: its hooks that receive keywords, and its hooks that are called after a failure too."""

HOOKS = (FORWARD_HOOKS, FORWARD_PRE_HOOKS, BACKWARD_HOOKS, BACKWARD_PRE_HOOKS)
HOOK_FLAGS = (FORWARD_HOOKS_WITH_KWARGS, FORWARD_HOOKS_ALWAYS_CALLED, FORWARD_PRE_HOOKS_WITH_KWARGS)

POST_ACCUMULATE_GRAD_HOOKS = "_post_accumulate_grad_hooks"
"""Attribute of a parameter: its hooks after the sum of its gradient, by number, or None."""

get_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
get_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)
get_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(MODULES)
get_forward_pre_hooks: Callable[[nn.Module], dict[int, Callable]] = attrgetter(FORWARD_PRE_HOOKS)
get_backward_hooks: Callable[[Any], dict[int, Callable] | None] = attrgetter(BACKWARD_HOOKS)

HOOKS_OF_ALL_MODULES: tuple[dict[int, Callable], ...] = (
    _of_all_modules._global_forward_hooks,
    _of_all_modules._global_forward_pre_hooks,
    _of_all_modules._global_backward_hooks,
    _of_all_modules._global_backward_pre_hooks,
)
"""Hooks that every module calls, as ``torch.nn.modules.module`` registers them."""


@contextmanager
def replacing_parameters(net: nn.Module, others: Mapping[int, Any]) -> Iterator[None]:
    """Replace parameters, by identity, in all modules of a network within the block.

    ``torch.func.functional_call`` fails to restore a module that has two names (DynUNet's have).
    """
    held = [
        (own, name, parameter)
        for own in map(get_parameters, net.modules())
        for name, parameter in own.items()
        if id(parameter) in others
    ]
    try:
        for own, name, parameter in held:
            own[name] = others[id(parameter)]
        yield
    finally:
        for own, name, parameter in held:
            own[name] = parameter


def apply_to_tensors(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Replace parameters and buffers by a function's results, as ``nn.Module.to`` and ``cuda`` do."""
    return module._apply(*args, **kwargs)


def load_from_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Load a module's own values, as ``nn.Module.load_state_dict`` does for each of its modules."""
    module._load_from_state_dict(*args, **kwargs)


@contextmanager
def swapping_by(swap: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Make ``nn.Module.to`` and similar methods change a parameter by ``swap(parameter, its new value)``."""
    before, always = torch.utils.swap_tensors, torch.__future__.get_swap_module_params_on_conversion()
    torch.utils.swap_tensors = swap
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.utils.swap_tensors = before
        torch.__future__.set_swap_module_params_on_conversion(always)
