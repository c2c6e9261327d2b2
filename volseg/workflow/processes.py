"""What the processes of one job have to agree on."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from volseg.parallel.devices import is_distributed
from volseg.parallel.processes.group import find_message_group
from volseg.parallel.processes.progress_sync import exchange

__all__ = ["gather_over_processes", "largest_over_processes"]


def largest_over_processes(value: int, device: torch.device) -> int:
    """Return the largest of the processes' values, to all of them; waits for the slowest."""
    if not is_distributed():
        return value
    values = torch.tensor([value], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values.item())


def gather_over_processes(names: Sequence[str]) -> list[str]:
    """Return the names that the processes pass, to all of them; each name once, in the order of the processes."""
    group = dist.group.WORLD if is_distributed() else None
    told = exchange(names, None if group is None else find_message_group(group))
    return list(dict.fromkeys(name for one in told for name in one))
