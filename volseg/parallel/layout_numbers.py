"""Check that processes add gradients of the same parameters, in the same memory layout.

After the gradients, processes add one number per gradient, which encodes its memory layout, or a missing gradient. If
the sum differs from the sum of equal numbers, the sum of the gradients belongs to no network. A GPU does not wait for
the check: the error is raised as soon as the number has arrived.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import has_values, is_gpu, on_gpu
from volseg.errors import ParallelError


class LayoutNumbers:
    """Layout numbers of gradients, kept on their device, so that a step waits for no copy.

    Parameters
    ----------
    count
        Number of processes that add.
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
        """Raise if differences have been recorded; wait for nothing.

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
