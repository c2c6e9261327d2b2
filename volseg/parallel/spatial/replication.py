"""Give all processes of a mesh the same network when it is wrapped, and check this when it first runs.

Each process computes a part of every layer with its own copy of the weights. Copies that differ (different seeds, a
checkpoint loaded in one process only) give a result that belongs to no network, so they get the first process's values,
as in ``DistributedDataParallel``.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from volseg.device.gpus import get_host_readable_device, has_values, host_values
from volseg.device.module_internals import get_buffers, get_parameters
from volseg.errors import ParallelError
from volseg.parallel.buckets import fill_buckets, read_layout


@torch.no_grad()
def replicate(net: nn.Module, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Give the network's parameters and buffers the values of the first process of each group in turn.

    Raises
    ------
    ParallelError
        If the processes built different networks: these have no values in common.
    """
    _check_structure(net, groups, device, modes=False)
    # In buckets: a network of small layers needs few broadcasts, and the memory of a large one is not doubled.
    for bucket in fill_buckets([tensor for _, tensor in _tensors(net)]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
        for group in groups:
            # As bytes: some backends lack some dtypes.
            dist.broadcast(flat.view(torch.uint8), dist.get_global_rank(group, 0), group=group)
        for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(values.view(tensor.shape))


@torch.no_grad()
def check_alike(net: nn.Module, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Refuse a network that differs between processes in modes, trained parameters, or any bit of its values.

    Raises
    ------
    ParallelError
        If networks differ; names the tensors.
    """
    _check_structure(net, groups, device, modes=True)
    named = list(_tensors(net))
    if named and has_values(device):  # without values no difference is possible
        sums = torch.stack([_checksum(tensor).to(device) for _, tensor in named])
        _check(sums, groups, [name for name, _ in named], "hold different values of their network")


def _check_structure(net: nn.Module, groups: Sequence[dist.ProcessGroup], device: torch.device, modes: bool) -> None:
    device = get_host_readable_device(device)
    with host_values():
        numbers = _fingerprint(net, device, modes)
        count = torch.tensor([len(numbers)], device=device)
        _check(count, groups, [f"{count.item()} modules here"], "built different networks")
        names = [name or type(module).__name__ for name, module in net.named_modules()]
        what = "do not run the same network in the same modes" if modes else "built different networks"
        _check(numbers, groups, names, what)


def _check(own: Tensor, groups: Sequence[dist.ProcessGroup], names: Sequence[str], what: str) -> None:
    """Compare numbers with those of the first process of each group; all processes reach the same verdict."""
    differs = torch.zeros_like(own, dtype=torch.int32)
    for group in groups:
        first = own.clone()
        dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
        differs |= (first != own).int()
    for group in groups:
        dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
    wrong = [name for name, found in zip(names, differs.tolist(), strict=True) if found]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ParallelError(
            f"the processes of a group {what}: {', '.join(wrong[:5])}{more}. Wrapping gives all of them the "
            "values of the first process; what is changed afterwards (load_state_dict, train(), requires_grad_, the "
            "memory format) must be changed in every process"
        )


def _tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters()
    yield from net.named_buffers()


def _fingerprint(net: nn.Module, device: torch.device, modes: bool) -> Tensor:
    """Return a number for each module: its type, its tensors, and with ``modes`` its trained parts.

    A tensor that two modules share is one tensor in the sums of gradients, which use its memory layout.
    """
    numbers, places = [], dict[int, int]()
    for name, module in net.named_modules():
        tensors = [
            (key, tensor is not None and (*_describe(tensor, modes), places.setdefault(id(tensor), len(places))))
            for key, tensor in (*get_parameters(module).items(), *get_buffers(module).items())
        ]
        trains = modes and getattr(module, "training", False)  # a frozen TorchScript module has no mode
        text = repr((name, type(module).__name__, trains, tensors))
        numbers.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True))
    return torch.tensor(numbers, device=device)


def _describe(tensor: Tensor, modes: bool) -> tuple[Any, ...]:
    strides = [step for step, size in zip(read_layout(tensor), tensor.shape, strict=True) if size > 1]
    return tuple(tensor.shape), strides, str(tensor.dtype), modes and tensor.requires_grad


CHUNK = 2**17
"""Elements summed at once: as 64-bit integers they take many times their own memory, and the first step's memory is
kept. This number fits into small segments, which exist anyway."""


def _checksum(tensor: Tensor) -> Tensor:
    """Return a sum of the tensor's bits, weighted by position; in integers, so exact in any order."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(sizes[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, part in zip(range(0, max(len(bits), 1), CHUNK), bits.split(CHUNK), strict=True):
        places = torch.arange(start, start + len(part), device=tensor.device)
        total += (part.long() * (2 * places + 1)).sum()
    return total
