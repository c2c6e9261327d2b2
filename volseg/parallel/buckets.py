"""Group parameters into buckets, store the gradients of a bucket in one block of memory, and check their sums.

After the gradients, processes add one number per gradient, which encodes its memory layout, or a missing gradient. If
the sum differs from the sum of equal numbers, the summed gradients do not belong together. A GPU does not wait for the
check: the error is raised as soon as the number has arrived.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor

from volseg.device.gpus import has_values, is_gpu, on_gpu
from volseg.device.torch_internals import find_backward_pass, get_accumulation_hooks, get_storage_key
from volseg.errors import ParallelError, UnsupportedOperatorError

BUCKET_BYTES = 16 * 2**20
"""Gradients summed in one call: large enough for the links' full speed, small enough to start early."""

FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket, whose gradients come last: no computation is left to hide their sum."""

LARGE = 2**16
"""Number of values from which a gradient is copied to its place at once; one kernel gathers smaller gradients."""


def fill_buckets(parameters: Sequence[Tensor], limit: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Put neighbouring parameters of one dtype into buckets of at most ``limit`` bytes, or of one parameter.

    The first bucket is smaller: see ``FIRST_BUCKET_BYTES``.
    """
    result: list[list[Tensor]] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        room = min(limit, FIRST_BUCKET_BYTES) if len(result) == 1 else limit
        if not result or filled + size > room or result[-1][0].dtype != parameter.dtype:
            result.append([])
            filled = 0
        result[-1].append(parameter)
        filled += size
    return result


class GradientRoom:
    """Contiguous memory for the gradients of a bucket, which are sent together.

    Large gradients come first: they can be written there as they are computed, without a gather. Small gradients and
    further values follow. The places depend only on the parameters, so all processes have the same places: a library
    may lay out gradients differently on each of them.

    Parameters
    ----------
    parameters : sequence of Tensor
        Of one dtype, on one device.
    num_further : int
        Number of values after the gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], num_further: int = 0) -> None:
        self.parameters = parameters
        self._num_large = sum(map(is_large, parameters))
        self._order = sorted(range(len(parameters)), key=lambda number: not is_large(parameters[number]))
        sizes = [parameters[number].numel() for number in self._order]
        self._starts = dict(zip(self._order, accumulate(sizes, initial=0), strict=False))
        self._size = sum(sizes) + num_further
        self._flat: Tensor | None = None
        self._put: set[int] = set()
        self._pass = -1

    def put(self, number: int, gradient: Tensor) -> Tensor:
        """Write the gradient of a large parameter, in any dtype, to its place, and return it there.

        The gradient of a second use of the parameter is returned as it is: autograd adds both, and `gather` takes the
        sum. Each backward pass has its own memory: a pass inside a hook of another one does not touch the other's
        gradients.
        """
        if self._flat is None or self._pass != find_backward_pass():
            self._flat, self._pass = self.parameters[0].new_empty(self._size), find_backward_pass()
            self._put.clear()
        if number in self._put:
            return gradient.to(self.parameters[number].dtype)
        self._put.add(number)
        return self._find(self._flat, number).copy_(gradient)

    def gather(self, gradients: Sequence[Tensor | None], further: Tensor | None = None) -> Tensor:
        """Return the gradients as one tensor, each in its parameter's layout, None as zeros; then start over.

        Parameters
        ----------
        gradients : sequence of Tensor or None
            In the order of the parameters; from `put`, or others.
        further : Tensor, optional
            Values after the gradients.
        """
        if self._flat is None or self._pass != find_backward_pass():
            return torch.cat(self._lay_out(self._order, gradients, further))
        flat, self._flat = self._flat, None
        self._put.clear()
        large, small = self._order[: self._num_large], self._order[self._num_large :]
        for number in large:
            gradient, place = gradients[number], self._find(flat, number)
            if gradient is None:
                place.zero_()
            elif not _is_same(gradient, place):
                place.copy_(gradient)
        rest = self._lay_out(small, gradients, further)
        if rest:
            begin = sum(self.parameters[number].numel() for number in large)
            torch.cat(rest, out=flat.narrow(0, begin, self._size - begin))
        return flat

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return views of the gradients in the result of `gather`, each in the shape and layout of its parameter."""
        return [self._find(flat, number) for number in range(len(self.parameters))]

    def _find(self, flat: Tensor, number: int) -> Tensor:
        parameter = self.parameters[number]
        offset = flat.storage_offset() + self._starts[number]
        return flat.as_strided(parameter.shape, read_layout(parameter), offset)

    def _lay_out(
        self, numbers: Sequence[int], gradients: Sequence[Tensor | None], further: Tensor | None
    ) -> list[Tensor]:
        pairs = [(gradients[number], self.parameters[number]) for number in numbers]
        missing = [parameter.numel() for gradient, parameter in pairs if gradient is None]
        # Allocated once: missing gradients are copied from these zeros.
        zeros = self.parameters[0].new_zeros(max(missing, default=0))
        parts = [
            zeros.narrow(0, 0, parameter.numel()) if gradient is None else _lie_like(gradient, parameter)
            for gradient, parameter in pairs
        ]
        return parts if further is None else [*parts, further]


def is_large(parameter: Tensor) -> bool:
    """Return whether a gradient is written to its place as soon as it is computed."""
    return parameter.numel() >= LARGE


def check_hooks(parameters: Sequence[ReferenceType[Tensor]], gradients: Sequence[Tensor | None]) -> None:
    """Refuse hooks that torch would call for parameters that only other processes reached in a backward pass.

    torch calls the hooks of a whole bucket: a hook after accumulation would find the gradient of an earlier step.

    Raises
    ------
    UnsupportedOperatorError
        If a parameter without a new gradient has such a hook and the gradient of an earlier step.
    """
    for reference, gradient in zip(parameters, gradients, strict=True):
        parameter = reference() if gradient is None else None
        if parameter is None or not parameter.is_leaf or parameter.grad is None:
            continue
        if get_accumulation_hooks(parameter):
            raise UnsupportedOperatorError(
                f"a parameter of shape {tuple(parameter.shape)} got no gradient in this backward pass, but its "
                "hook (register_post_accumulate_grad_hook) would get the gradient of an earlier pass again: set the "
                "gradient to None between the passes, freeze the parameter, or remove the hook"
            )


def _is_same(gradient: Tensor, place: Tensor) -> bool:
    return (
        get_storage_key(gradient.untyped_storage()) == get_storage_key(place.untyped_storage())
        and gradient.storage_offset() == place.storage_offset()
        and gradient.stride() == place.stride()
    )


def _lie_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    layout = read_layout(parameter)
    sides = zip(gradient.shape, gradient.stride(), layout, strict=True)
    if any(size > 1 and own != wanted for size, own, wanted in sides):
        gradient = gradient.new_empty_strided(gradient.shape, layout).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def read_layout(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: its parameter's strides if they leave no gaps in memory, as in torch."""
    return parameter.stride() if parameter.is_contiguous() else torch.empty_like(parameter, device="meta").stride()


class LayoutNumbers:
    """Layout numbers of gradients, kept on their device, so that a step waits for no copy.

    Parameters
    ----------
    count
        Number of processes in a sum.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def read(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the layout number of each gradient, and the sums that equal numbers would give.

        The number of a missing gradient (None) is zero.
        """
        codes = tuple(
            0 if gradient is None else _number_layout(parameter)
            for gradient, parameter in zip(gradients, parameters, strict=True)
        )
        key = codes, parameters[0].dtype, parameters[0].device
        if key not in self._kept:
            own = torch.tensor(codes, dtype=parameters[0].dtype)
            sums = own * self._count
            self._kept[key] = own.to(parameters[0].device), sums.to(parameters[0].device)
        return self._kept[key]


class Differences:
    """Parameters whose layout numbers differed between processes, recorded on the device.

    Parameters
    ----------
    names
        Names of the parameters.
    device
        Device of the parameters.
    refusal
        The message; ``{names}`` is replaced by the parameters.
    """

    def __init__(self, names: Sequence[str], device: torch.device, refusal: str) -> None:
        self.names, self._refusal = names, refusal
        self.found = torch.zeros(len(names), dtype=torch.bool, device=device)
        self._copy = torch.zeros(len(names), dtype=torch.bool, pin_memory=True) if is_gpu(device) else self.found
        self._copied: torch.cuda.Event | None = None

    def note(self, first: int, differ: Tensor) -> None:
        """Record differences, from a given parameter on; on a CPU raise at once."""
        self.found.narrow(0, first, len(differ)).logical_or_(differ)
        if not on_gpu(self.found):
            self.look()

    def look(self) -> None:
        """Raise if differences have been recorded, without waiting for a device.

        Raises
        ------
        ParallelError
            If processes have added gradients of different parameters or layouts.
        """
        if not has_values(self.found.device):
            return
        if self.found.is_cuda:
            if torch.cuda.is_current_stream_capturing() or (self._copied is not None and not self._copied.query()):
                return
            if self._copied is None or not bool(self._copy.any()):
                self._copy.copy_(self.found, non_blocking=True)
                self._copied = torch.cuda.current_stream(self.found.device).record_event()
                return
        if bool(self._copy.any()):
            wrong = [name for name, found in zip(self.names, self._copy.tolist(), strict=True) if found]
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ParallelError(self._refusal.format(names=f"{', '.join(wrong[:5])}{more}"))


def _number_layout(parameter: Tensor) -> int:
    """Encode a gradient's memory layout in small numbers, whose sums are exact in 16 bits too."""
    if parameter.is_contiguous():
        return 1
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.ndim)
    return 2 if channels_last is not None and parameter.is_contiguous(memory_format=channels_last) else 3
