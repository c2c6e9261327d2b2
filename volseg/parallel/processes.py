"""Start the process group of this job, and end it."""

import torch
import torch.distributed as dist

from volseg.parallel.devices import find_own_device

__all__ = ["start_group"]


def start_group() -> None:
    """Initialise the default process group from torchrun's environment, unless that was done."""
    if dist.is_initialized():
        return
    device = find_own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
