"""Devices of this process, its rank and the number of processes: the only module that queries them.

A *launched* process was started by ``torchrun``, ``launch``, ``srun``, or another program that sets their variables; a
*distributed* one has also joined a process group with others.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist

from volseg.device.gpus import count_gpus as count_gpus  # also for callers
from volseg.device.gpus import uses_gpus as uses_gpus
from volseg.errors import ParallelError
from volseg.launched import Launch, read_launch

Devices: TypeAlias = Sequence[str | int | torch.device] | None
"""Devices of this process, as a user names them; None for all visible ones."""

_own_device: torch.device | None = None


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Use this device in the block, and ignore the launcher's variables, which belong to another job."""
    global _own_device
    before, _own_device = _own_device, device
    try:
        yield
    finally:
        _own_device = before


def _get_launch() -> Launch | None:
    return read_launch() if _own_device is None else None


def is_launched() -> bool:
    """Return whether a launcher started this process and gave it a device; see ``volseg.launched``."""
    return _get_launch() is not None


def count_launched() -> int:
    """Return the number of processes that were started for this job; they may not have joined a group yet."""
    launch = _get_launch()
    return 1 if launch is None else launch.world_size


_restarts = 0


def note_restarts(count: int) -> None:
    """Set the number of earlier attempts, as the processes agreed; a launcher may have counted fewer."""
    global _restarts
    _restarts = count


def count_restarts() -> int:
    """Return how often the processes of this job were restarted; 0 in the first attempt.

    Processes of a group agree on the number; before the rendezvous each returns its launcher's count.
    """
    launch = _get_launch()
    return max(_restarts, 0 if launch is None else launch.restarts)


def has_process_group() -> bool:
    """Return whether this process has joined a process group, even one of a single process."""
    return dist.is_available() and dist.is_initialized()


def count_processes() -> int:
    """Return how many processes are in the process group; 1 without one."""
    return dist.get_world_size() if has_process_group() else 1


def is_distributed() -> bool:
    """Return whether this process works with others."""
    return count_processes() > 1


def read_local_rank() -> int:
    """Return the local rank that the launcher gave to this process; 0 without a launcher."""
    launch = _get_launch()
    return 0 if launch is None else launch.local_rank


def get_process_rank() -> int:
    """Return this process's rank in the process group; 0 without one."""
    return dist.get_rank() if has_process_group() else 0


def is_main_process() -> bool:
    """Return whether this process writes files and shows progress; before the rendezvous by its launcher's rank."""
    launch = None if has_process_group() else _get_launch()
    return get_process_rank() == 0 if launch is None else launch.rank == 0


def list_gpus() -> list[torch.device]:
    """Return the GPUs that this process sees."""
    return [torch.device("cuda", index) for index in range(count_gpus())]


def list_devices() -> list[torch.device]:
    """Return the GPUs that this process sees, or the CPU without GPUs."""
    return list_gpus() or [torch.device("cpu")]


_on_cpu = False


def stay_on_cpu(wanted: bool) -> None:
    """Set whether the processes of this job compute on the CPU, even if there are GPUs."""
    global _on_cpu
    _on_cpu = wanted


def get_own_device() -> torch.device:
    """Return the device of a launched process: the GPU of its local rank, or the CPU."""
    return _own_device or _device_of(read_local_rank())


def _device_of(local_rank: int) -> torch.device:
    devices = [torch.device("cpu")] if _on_cpu else list_devices()
    return devices[local_rank % len(devices)]


def name_place(rank: int, world_size: int, local_rank: int) -> str:
    """Describe a process of this machine for messages: its rank, host and device."""
    return f"process {rank} of {world_size} ({socket.gethostname()}, {_device_of(local_rank)})"


def name_own_place() -> str:
    """Describe this process for messages."""
    launch = _get_launch()
    if launch is None:
        return name_place(get_process_rank(), count_processes(), 0)
    return name_place(launch.rank, launch.world_size, launch.local_rank)


def current_gpu_or_cpu() -> torch.device:
    """Return torch's current GPU, or the CPU; a started group has set the process's own GPU as current."""
    return torch.device("cuda", torch.cuda.current_device()) if count_gpus() else torch.device("cpu")


def name_devices(devices: Devices) -> list[torch.device]:
    """Return the devices named in a call, with numbers for GPUs; by default all visible ones.

    The devices need not exist: a placement may be planned on another machine.

    Raises
    ------
    ParallelError
        If ``devices`` is empty or not a sequence, a name is not a torch device, or ``cuda`` has no number and no GPU is
        visible.
    """
    if devices is None:
        return list_devices()
    if isinstance(devices, str | int | torch.device) or not len(devices):
        raise ParallelError(
            f"devices must be a sequence of at least one device, such as ['cuda:0', 'cuda:1'], got {devices!r}"
        )
    named = [_name_device(device) for device in devices]
    if torch.device("cuda") in named and not count_gpus():
        raise ParallelError(f"devices names cuda, but no GPU is visible, got {devices!r}; use cpu")
    return [current_gpu_or_cpu() if device == torch.device("cuda") else device for device in named]


def _name_device(device: str | int | torch.device) -> torch.device:
    try:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as fault:
        raise ParallelError(f"devices names {device!r}, which is not a device; available: {_tell_devices()}") from fault


def require_visible(devices: Sequence[torch.device]) -> None:
    """Raise a `ParallelError` if a device is a GPU that this process does not see."""
    if absent := [device for device in devices if device.type == "cuda" and (device.index or 0) >= count_gpus()]:
        raise ParallelError(f"devices names {absent[0]}, which does not exist; available: {_tell_devices()}")


def _tell_devices() -> str:
    return ", ".join(map(str, [torch.device("cpu"), *list_gpus()]))


def require_devices(devices: int | Sequence[str], kind: str) -> list[str]:
    """Return the names of devices requested by number or by names; all must exist.

    Parameters
    ----------
    devices
        A number of GPUs, or names such as ``cuda:1``; ``cpu`` may be named several times.
    kind
        ``"cuda"`` or ``"cpu"``: the kind that a number counts. The CPU may be counted any number of times.

    Raises
    ------
    ParallelError
        If a device is missing; lists the available ones.
    """
    if not isinstance(devices, int):
        require_visible(list(map(_name_device, devices)))
        return list(devices)
    if kind == "cpu":
        return ["cpu"] * devices
    if devices > count_gpus():
        raise ParallelError(f"devices is {devices}, but only {count_gpus()} GPU(s) are visible; use at most as many")
    return [str(gpu) for gpu in list_gpus()[:devices]]
