"""What the processes of one job have to agree on."""

import torch
import torch.distributed as dist

from volseg.parallel.devices import is_distributed

__all__ = ["largest_over_processes"]


def largest_over_processes(value: int, device: torch.device) -> int:
    """Return the largest of the processes' values, to all of them; waits for the slowest."""
    if not is_distributed():
        return value
    values = torch.tensor([value], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values.item())
