"""Choose channels last for networks on devices where it is faster, and convert their weights."""

import torch
from torch import nn

from volseg.device.gpus import find_capability, is_gpu

__all__ = ["put_channels_last", "suits_channels_last"]


def suits_channels_last(home: torch.device) -> bool:
    """Return whether the device has 16-bit matrix units, for which channels last is faster."""
    return is_gpu(home) and find_capability(home) >= (8, 0)


def put_channels_last(net: nn.Module) -> None:
    """Lay out the convolutions' weights with channels last, in place: the optimizer may hold the parameters already."""
    for parameter in net.parameters():
        if parameter.ndim in (4, 5):
            layout = torch.channels_last if parameter.ndim == 4 else torch.channels_last_3d
            parameter.data = parameter.data.contiguous(memory_format=layout)
