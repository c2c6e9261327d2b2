"""All processes of a mesh hold the same network: made so when it is wrapped, and checked when it first runs.

Each process computes a part of every layer with its own copy of the weights. Copies that differ (seeds that differ, a
checkpoint loaded in one process only) give a result that belongs to no network, so they get the first process's values,
as ``DistributedDataParallel`` does it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from volseg.device.gpus import find_readable, has_values, host_values
from volseg.device.module_internals import get_buffers, get_parameters
from volseg.errors import ParallelError
from volseg.parallel.buckets import fill_buckets, read_layout

__all__ = ["check_alike", "replicate"]


@torch.no_grad()
def replicate(net: nn.Module, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Give the network's parameters and buffers the values of the first process of each group in turn.

    Raises
    ------
    ParallelError
        If the processes built different networks, which have no values in common.
    """
    _check_structure(net, groups, device, modes=False)
    # Buckets, so that a network of small layers is a few broadcasts and a large one does not double its memory.
    for bucket in fill_buckets([tensor for _, tensor in _tensors(net)]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
        for group in groups:
            # As bytes: not every backend knows every type.
            dist.broadcast(flat.view(torch.uint8), dist.get_global_rank(group, 0), group=group)
        for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(values.view(tensor.shape))


@torch.no_grad()
def check_alike(net: nn.Module, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Refuse a network that is not the same in all processes: its modes, what is trained, and every bit of its values.

    Raises
    ------
    ParallelError
        Naming the tensors that differ.
    """
    _check_structure(net, groups, device, modes=True)
    named = list(_tensors(net))
    if named and has_values(device):  # there no values can differ
        sums = torch.stack([_checksum(tensor).to(device) for _, tensor in named])
        _check(sums, groups, [name for name, _ in named], "hold different values of their network")


def _check_structure(net: nn.Module, groups: Sequence[dist.ProcessGroup], device: torch.device, modes: bool) -> None:
    device = find_readable(device)
    with host_values():
        numbers = _fingerprint(net, device, modes)
        count = torch.tensor([len(numbers)], device=device)
        _check(count, groups, [f"{count.item()} modules here"], "built different networks")
        names = [name or type(module).__name__ for name, module in net.named_modules()]
        what = "do not run the same network in the same modes" if modes else "built different networks"
        _check(numbers, groups, names, what)


def _check(own: Tensor, groups: Sequence[dist.ProcessGroup], names: Sequence[str], what: str) -> None:
    """Compare numbers with those of the first process of each group; all processes come to the same verdict."""
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
    """Return a number for each module: what it is, its tensors, and with ``modes`` what of it is trained.

    Tensors that two modules share are one for the sums of gradients, and these take them as they lie in memory.
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
"""Elements summed at once: as 64-bit integers, several times over, they take many times their own memory, and what is
taken in the first step is kept. So many go into the small segments, which are there anyway."""


def _checksum(tensor: Tensor) -> Tensor:
    """Return a sum of the tensor's bits, each element's weighted by its place; integers, so exact in any order."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(sizes[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, part in zip(range(0, max(len(bits), 1), CHUNK), bits.split(CHUNK), strict=True):
        places = torch.arange(start, start + len(part), device=tensor.device)
        total += (part.long() * (2 * places + 1)).sum()
    return total
