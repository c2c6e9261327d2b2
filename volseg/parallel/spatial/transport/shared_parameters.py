"""Share parameters between shards on several processes, and sum their gradients.

A bucket's gradients are summed in one call, on a separate stream, during the backward pass. For this they are in one
piece of memory. The gradient of a large parameter that autocast converts is converted into that piece, without a
separate gather: it is read once and written once before it is sent.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.device.gpus import current_gpu_stream, is_gpu, make_stream, on_stream
from volseg.device.torch_internals import accept_gradients_of_other_streams
from volseg.parallel.buckets import GradientRoom, check_hooks, is_large
from volseg.parallel.fixed_order import add_up
from volseg.parallel.layout_numbers import Differences, LayoutNumbers

REFUSAL = (
    "the shards of a volume used {names} in a step in different ways: some shards had a gradient for it and others had "
    "none, or it lies in memory in another layout, so that their sum belongs to no network; let forward() use the same "
    "parameters in all processes, and give them the same memory format in all"
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
