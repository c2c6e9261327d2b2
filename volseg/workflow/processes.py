"""What the processes of one job have to agree on."""

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from volseg.parallel.devices import count_processes, is_distributed

__all__ = ["gather_over_processes", "largest_over_processes"]


def largest_over_processes(value: int, device: torch.device) -> int:
    """Return the largest of the processes' values, to all of them; waits for the slowest."""
    if not is_distributed():
        return value
    values = torch.tensor([value], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values.item())


def gather_over_processes(names: Sequence[str], device: torch.device) -> list[str]:
    """Return the names that the processes pass, to all of them; each name once, in the order of the processes."""
    if not is_distributed():
        return list(dict.fromkeys(names))
    message = json.dumps(list(names)).encode()
    message = message.ljust(largest_over_processes(len(message), device))
    own = torch.tensor(list(message), dtype=torch.uint8, device=device)
    received = [torch.empty_like(own) for _ in range(count_processes())]
    dist.all_gather(received, own)
    return list(dict.fromkeys(name for one in received for name in json.loads(bytes(one.tolist()))))
