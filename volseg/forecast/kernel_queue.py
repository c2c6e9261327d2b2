"""How far Python gets ahead of a GPU: as many kernels as a stream's queue has room for.

CUDA puts the kernels that it is asked to start into a queue of the stream, and whoever asks goes on. Where a step takes
the GPU longer than Python, Python comes further ahead with each step, until the queue is full; from then on it waits
for one kernel to end before it starts another. What two streams use and is let go meanwhile is not handed out again
before the GPU has come past it, so this decides what steps reserve that nobody waits for.
"""

from collections import deque

from volseg.forecast.trace import KernelRun

__all__ = ["KernelQueue", "count_kernels"]

ROOM = 1024
"""Kernels of a stream that wait or run; of several streams each has as many. CUDA does not document it:
https://forums.developer.nvidia.com/t/cuda-stream-are-blocked-when-luanch-lots-of-kernels-1000/68937"""

NORMS = ("batch_norm", "group_norm", "layer_norm")


def count_kernels(run: KernelRun) -> int:
    """Return how many kernels an operator starts.

    A convolution's gradients are two, and one that clears the weight's. cuDNN has channels last: where they are not,
    what each reads and writes is copied by another one. Norms find statistics first.

    Examples
    --------
    >>> import torch
    >>> [count_kernels(KernelRun(name, torch.float32, 0, 0)) for name in ("aten.add_", "aten.convolution")]
    [1, 4]
    """
    if not run.name.startswith("aten."):
        return 1
    if "convolution" in run.name:
        kernels, extra = (2, 1) if "backward" in run.name else (1, 0)
        return kernels * (1 if run.channels_last else 4) + extra
    return 2 if any(norm in run.name for norm in NORMS) else 1


class KernelQueue:
    """Kernels of one stream that are not done yet."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque()
        """When each operator is done, and its kernels."""
        self._waiting = 0

    def find_room(self, kernels: int, now: float) -> float:
        """Return when there is room: ``now``, or when enough of what was put in earlier is done."""
        while self._ends and (self._ends[0][0] <= now or self._waiting + kernels > ROOM):
            end, done = self._ends.popleft()
            self._waiting -= done
            now = max(now, end)
        return now

    def put(self, kernels: int, end: float) -> None:
        """Add what is done at ``end``, which is no earlier than what was added before."""
        self._ends.append((end, kernels))
        self._waiting += kernels
