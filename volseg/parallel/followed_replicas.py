"""Follow ``DistributedDataParallel`` on fake tensors: torch's own is C++ that reads real memory.

Its steps follow torch's sources (``csrc/distributed/c10d/reducer.cpp``): buckets of flat gradients beside the gradients
themselves, a copy of each into its bucket and back, a sum over each bucket, and a copy of the network's outputs, from
which torch finds unused parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.gpus import observer
from volseg.device.torch_internals import find_backward_pass, tree_map_only

__all__ = ["FollowedReplicas"]

LIMITS = (2**20, 25 * 2**20)
"""Bytes at which a bucket is full: the first bucket of a device, and the others."""


class FollowedReplicas(nn.Module):
    """Stand-in for `DistributedDataParallel` in a step on fake tensors.

    Parameters
    ----------
    model : callable
        Network of one replica.
    parameters : iterable of Tensor
        Trained parameters, on their devices, in the order of the network.
    processes : int
        Number of processes that sum gradients.
    """

    _model: Callable[..., Any]

    def __init__(self, model: Callable[..., Any], parameters: Iterable[Tensor], processes: int) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)  # its parameters are not this module's
        self._processes = processes
        trained = list(parameters)
        for device in dict.fromkeys(parameter.device for parameter in trained):  # the first replica's weights are sent
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in trained if parameter.device == device])
            observer().on_sent(device, "broadcast", flat.nbytes, processes)
            del flat
        for bucket in _fill_buckets(trained):
            _Bucket(bucket, processes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network, and copy its outputs."""
        outputs = self._model(*args, **kwargs)
        return tree_map_only(Tensor, lambda value: value.clone() if value.requires_grad else value, outputs)


class _Bucket:
    """Gradients that are summed in one message; their hooks hold the bucket."""

    def __init__(self, parameters: list[Tensor], processes: int) -> None:
        first = parameters[0]
        self._processes, self._count, self._arrived = processes, len(parameters), 0
        self._pass = -1
        self._flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        begin = 0
        for parameter in parameters:
            parameter.register_hook(partial(self.take, slice(begin, begin + parameter.numel())))
            begin += parameter.numel()

    def take(self, place: slice, gradient: Tensor) -> Tensor:
        """Multiply a gradient as in `Piped`, so that its mean is a sum; copy it into the bucket, and back.

        A parameter that the step does not use gets no gradient: the next pass reports the sum of its bucket.
        """
        multiplied = gradient * self._processes
        begun, self._pass = self._pass, find_backward_pass()
        if self._arrived and begun != self._pass:
            observer().on_sent(self._flat.device, "all_reduce", self._flat.nbytes, self._processes)
            self._arrived = 0
        view = self._flat[place].view_as(multiplied)
        view.copy_(multiplied)
        self._arrived = (self._arrived + 1) % self._count
        if self._arrived == 0:
            observer().on_sent(self._flat.device, "all_reduce", self._flat.nbytes, self._processes)
        multiplied.copy_(view)
        return multiplied


def _fill_buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group parameters of one device and dtype until a bucket is full."""
    kinds = dict.fromkeys((parameter.device, parameter.dtype) for parameter in parameters)
    for kind in kinds:
        limit, size, bucket = LIMITS[0], 0, list[Tensor]()
        for parameter in parameters:
            if (parameter.device, parameter.dtype) != kind:
                continue
            bucket.append(parameter)
            size += parameter.nbytes
            if size >= limit:
                yield bucket
                limit, size, bucket = LIMITS[1], 0, []
        if bucket:
            yield bucket
