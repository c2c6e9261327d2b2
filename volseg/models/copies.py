"""A module run on copies of its parameters and buffers, which keeps its own whatever the run does."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from volseg.device.module_internals import get_buffers, get_parameters

__all__ = ["run_on_copies"]


def run_on_copies(net: nn.Module, copy: Callable[[Tensor], Tensor], *args: Any) -> Any:
    """Return ``net(*args)``, computed with a copy of each parameter and buffer.

    Every place of a module is lent its tensor once, and tensors that stand in several places are one there too. With
    its own ``tie_weights``, ``torch.func.functional_call`` (2.13) puts back what it lent where a module has two names,
    as the layers of MONAI's DynUNet have, and leaves out what such a module shares with others without it.

    Parameters
    ----------
    net : nn.Module
        Anything that is called with ``args``.
    copy : callable
        Makes the copy, for instance on the meta device.
    *args
        Handed to ``net``.
    """
    copies: dict[int, Tensor] = {}
    lent: dict[str, Tensor] = {}
    for prefix, module in net.named_modules():
        for key, tensor in (*get_parameters(module).items(), *get_buffers(module).items()):
            if tensor is None:
                continue
            if id(tensor) not in copies:
                copies[id(tensor)] = copy(tensor)
            lent[f"{prefix}.{key}" if prefix else key] = copies[id(tensor)]
    return functional_call(net, lent, args, tie_weights=False)
