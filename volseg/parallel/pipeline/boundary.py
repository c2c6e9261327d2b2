"""Refuse devices, modules and cuts that a pipeline cannot take, before anything runs."""

from collections.abc import Sequence

import torch
from torch import nn

from volseg.device.gpus import is_gpu
from volseg.device.torch_internals import is_compiled
from volseg.errors import PartitionError
from volseg.parallel.devices import name_devices

__all__ = ["choose_devices", "find_start", "refuse_hidden"]


def refuse_hidden(net: nn.Module) -> None:
    """Refuse modules whose functions cannot be intercepted.

    Raises
    ------
    PartitionError
        If there is such a module.
    """
    for path, module in net.named_modules():
        where = repr(path) if path else "the network itself"
        if isinstance(module, torch.jit.ScriptModule):
            kind, remedy = "scripted", "pass the module that torch.jit.script was given"
        elif is_compiled(module):
            kind, remedy = "compiled", "pass the module that torch.compile was given (its ._orig_mod)"
        else:
            continue
        raise PartitionError(
            f"the pipeline intercepts the functions of a network, and {where} ({type(module).__name__}) is "
            f"{kind}: {remedy}"
        )


def choose_devices(devices: Sequence[str | int | torch.device] | None) -> list[torch.device]:
    """Return the devices of the stages; all GPUs by default.

    Raises
    ------
    ParallelError
        If a device is missing.
    """
    # Host tensors do not keep a device number ("cpu:1").
    return [device if is_gpu(device) else torch.device(device.type) for device in name_devices(devices)]


def find_start(cut: str, starts: Sequence[str]) -> int:
    """Return the segment that starts with module ``cut`` or inside it.

    Raises
    ------
    PartitionError
        If no segment starts there; lists the possible starts.
    """
    for number, path in enumerate(starts):
        if path == cut or path.startswith(f"{cut}."):
            return number
    raise PartitionError(
        f"no stage can start at {cut!r}: it is not called, or lies between the creation and an in-place change of "
        f"a tensor. Stages can start at {', '.join(starts[1:]) or 'no module of this network'}"
    )
