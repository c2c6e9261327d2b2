"""What the processes of one job have to agree on."""

import torch
import torch.distributed as dist

__all__ = ["is_distributed", "is_main_process", "largest_over_processes", "leave_processes"]


def is_distributed() -> bool:
    """Tell whether this process works with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_main_process() -> bool:
    """Tell whether this process writes files and shows progress."""
    return not is_distributed() or dist.get_rank() == 0


def largest_over_processes(value: int, device: torch.device) -> int:
    """Return the largest of the processes' values, to all of them; waits for the slowest."""
    if not is_distributed():
        return value
    values = torch.tensor([value], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values.item())


def leave_processes() -> None:
    """End this process's part of the job, when all have done theirs; without one, do nothing.

    Not after a failure: the others may never come to the end, for which this waits.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
