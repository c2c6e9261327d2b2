"""Copy the parameters of a network to the shards' devices, for one forward pass.

One owner, with a rule for each mode:

- A copy made while gradients are recorded has history, and is used with and without gradients. A copy made under
  ``no_grad`` (self-conditioning, recycling), or while the parameter is frozen, is never used with gradients.
- A copy is valid as long as its parameter is unchanged: in place (its version) and by ``.data`` (its address).
- A recomputed block uses the copies of the pass that it repeats. After the pass no copy is kept: a head called outside
  of ``forward`` reads the current parameters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from volseg.device.gpus import get_address
from volseg.device.torch_internals import as_savable, get_version
from volseg.parallel.buckets import fill_buckets
from volseg.parallel.spatial.transport.communicator import Communicator


class _Copied(NamedTuple):
    """Copies of a tensor, and the tensor's state when they were made."""

    copies: list[Tensor]
    state: tuple[int, int]


class _Cast(NamedTuple):
    """A copy in another dtype; holds the source, whose ``id`` is the key and must not be reused for another tensor."""

    copy: Tensor
    state: tuple[int, int]
    result: Tensor


def _read_state(tensor: Tensor) -> tuple[int, int]:
    """Return values that change with the tensor, in place or by ``.data``."""
    return get_version(tensor), get_address(tensor)


class Copies:
    """Copies of one pass.

    Gradients of a bucket of parameters are summed in one call. The bucket goes to the shards when the first of its
    parameters is used with gradients: autograd runs the most recent ready node first, so the sum starts in the middle
    of the backward pass instead of its end.
    """

    def __init__(self, communicator: Communicator, parameters: Sequence[Tensor]) -> None:
        self._communicator = communicator
        # The buckets hold the parameters, so that no other tensor gets the id of one.
        self._buckets = {id(parameter): bucket for bucket in fill_buckets(parameters) for parameter in bucket}
        self._recorded: dict[int, _Copied] = {}
        self._silent: dict[int, _Copied] = {}
        self._ids: set[int] = set()
        self._casts: dict[tuple[int, torch.dtype, bool], _Cast] = {}

    def find(self, whole: Tensor) -> list[Tensor] | None:
        """Return a parameter's copies, one per slab; None for any other tensor."""
        key = id(whole)
        found = self._recorded.get(key)
        if found is not None and found.state == _read_state(whole) and whole.requires_grad:
            return found.copies
        bucket = self._buckets.get(key)
        if bucket is None:
            return None
        if whole.requires_grad and torch.is_grad_enabled():
            return self._record(whole, bucket if found is None else [whole])
        found = self._silent.get(key)
        if found is None or found.state != _read_state(whole):
            found = self._silent[key] = self._noted(whole, copy_plain(self._communicator, whole))
        return found.copies

    def cast(self, copy: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy in autocast's dtype, which is converted only once."""
        if id(copy) not in self._ids:
            return copy.to(dtype)
        key = id(copy), dtype, copy.requires_grad and torch.is_grad_enabled()
        found = self._casts.get(key)
        state = _read_state(copy)
        if found is None or found.copy is not copy or found.state != state:
            found = self._casts[key] = _Cast(copy, state, self._communicator.convert(copy, dtype))
        return found.result

    def _record(self, whole: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
        # A parameter that is frozen for now would get no gradient once it is unfrozen.
        trained = [parameter for parameter in bucket if parameter.requires_grad]
        for parameter, copies in zip(trained, self._communicator.share(trained), strict=True):
            self._recorded[id(parameter)] = self._noted(parameter, [as_savable(copy) for copy in copies])
        return self._recorded[id(whole)].copies

    def _noted(self, whole: Tensor, copies: list[Tensor]) -> _Copied:
        self._ids.update(map(id, copies))
        return _Copied(copies, _read_state(whole))


def copy_plain(communicator: Communicator, whole: Tensor) -> list[Tensor]:
    """Return a value on each shard's device, without a sum of its gradients."""
    return [whole.to(device, non_blocking=True) for device in communicator.devices]
