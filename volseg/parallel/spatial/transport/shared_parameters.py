"""Parameters of a network on the shards: their copies for one forward pass, and the sums of their gradients.

The copies have one owner, with a rule for each mode:

- A copy made while gradients are recorded has history, and is used with and without gradients. A copy made under
  ``no_grad`` (self-conditioning, recycling), or while the parameter is frozen, is never used with gradients.
- A copy is valid as long as its parameter is unchanged: in place (its version) and by ``.data`` (its address).
- A recomputed block uses the copies of the pass that it repeats. After the pass no copy is kept: a head called outside
  of ``forward`` reads the current parameters.

Between processes a bucket's gradients are summed in one call, on a separate stream, during the backward pass. For this
they are in one piece of memory. The gradient of a large parameter that autocast converts is converted into that piece,
without a separate gather: it is read once and written once before it is sent.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.device.gpus import current_gpu_stream, get_address, is_gpu, make_stream, on_stream
from volseg.device.torch_internals import accept_gradients_of_other_streams, as_savable, get_version
from volseg.parallel.buckets import Differences, GradientRoom, LayoutNumbers, check_hooks, fill_buckets, is_large
from volseg.parallel.fixed_order import add_up
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


REFUSAL = (
    "the shards of a volume used {names} differently in a step: only some shards had a gradient for it, or its memory "
    "layout differs between shards, so the sum of the gradients is wrong; let forward() use the same parameters in all "
    "processes, with the same memory format"
)


class SharedParameters:
    """Parameters of a network on one of several processes.

    Parameters
    ----------
    group, device, fixed_order
        See ``ProcessGroupShards``.

    Attributes
    ----------
    stream
        Stream of the sums of gradients; None on a CPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, fixed_order: bool) -> None:
        self._group, self._device, self._fixed_order = group, device, fixed_order
        self._numbers = LayoutNumbers(dist.get_world_size(group))
        self._differences: dict[tuple[str, ...], Differences] = {}
        self.stream = make_stream(device) if is_gpu(device) else None
        if self.stream is not None:
            # Intended: a parameter that only coarse, uncut levels use shares its bucket's stream, and autograd waits.
            accept_gradients_of_other_streams()

    def share(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a bucket of parameters for this process's shard; their gradients are summed once all have arrived."""
        self.look()
        # Autograd runs a node's backward on the stream of its forward. So does AccumulateGrad: nothing on the main
        # stream waits.
        if self.stream is not None:
            self.stream.wait_stream(current_gpu_stream(self._device))
        with self.beside():
            return _Share.apply(self, *parameters)

    def convert(self, copy: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a parameter from `share` in another dtype; a large gradient goes to its place in the sum at once."""
        room = getattr(copy.grad_fn, "room", None)
        if not isinstance(room, GradientRoom) or not torch.is_grad_enabled() or not is_large(copy):
            return copy.to(dtype)
        reading = None if self.stream is None else current_gpu_stream(self._device)
        with self.beside():
            return _Convert.apply(copy, dtype, self, reading, room)

    def sum_alike(self, gradients: Sequence[Tensor | None], room: GradientRoom) -> list[Tensor | None]:
        """Return parameters' gradients summed over the shards, outside autograd; None stays None."""
        own, equal = self._numbers.read(gradients, room.parameters)
        total = add_up(room.gather(gradients, own), self._group, self._fixed_order)
        names = tuple(f"a parameter of shape {tuple(parameter.shape)}" for parameter in room.parameters)
        if names not in self._differences:
            self._differences[names] = Differences(names, self._device, REFUSAL)
        self._differences[names].note(0, total[-len(own) :] != equal)
        return [None if given is None else part for given, part in zip(gradients, room.split(total), strict=True)]

    def look(self) -> None:
        """Raise if sums of gradients in the last steps did not belong together; wait for nothing.

        Raises
        ------
        ParallelError
            If there was such a sum.
        """
        for differences in self._differences.values():
            differences.look()

    def beside(self) -> AbstractContextManager[Any]:
        """Run work on the stream of the gradients' sums, on devices with streams."""
        return nullcontext() if self.stream is None else on_stream(self.stream)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedParameters, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.shared, ctx.given = shared, [weakref.ref(parameter) for parameter in parameters]
        ctx.room = GradientRoom([parameter.detach() for parameter in parameters], len(parameters))
        # A parameter that no shard used keeps the gradient None, as on one device.
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        check_hooks(ctx.given, gradients)
        if all(gradient is None for gradient in gradients):
            return None, *gradients
        with ctx.shared.beside():  # where autograd has put it already, if that is a real stream
            return None, *ctx.shared.sum_alike(gradients, ctx.room)


class _Convert(torch.autograd.Function):
    """Convert a shared parameter: the copy is made where it is read, its gradient where it is summed."""

    @staticmethod
    def forward(
        ctx: Any, copy: Tensor, dtype: torch.dtype, shared: SharedParameters, reading: Any, room: GradientRoom
    ) -> Tensor:
        ctx.shared, ctx.room, ctx.number = shared, room, copy.output_nr
        ctx.set_materialize_grads(False)
        with nullcontext() if reading is None else on_stream(reading):
            return copy.to(dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.shared.beside():
            return None if gradient is None else ctx.room.put(ctx.number, gradient), None, None, None, None
