"""Whether processes add gradients of the same parameters, which lie in memory alike.

Behind the gradients that processes add travels a number for each, which tells how it lies in memory, or that there is
none. Where their sum is not what it is among equals, the sum of the gradients belongs to no network. On a GPU nobody
waits to be told so: it is refused as soon as the number has come.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import has_values, is_gpu, on_gpu
from volseg.errors import ParallelError

__all__ = ["Differences", "LayoutNumbers"]


class LayoutNumbers:
    """The numbers of gradients, kept on their device, as a step waits for no copy.

    Parameters
    ----------
    count
        Processes that add.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def read(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the layout of each gradient, which is its parameter's, as a number, and their sums among equals.

        The number of a None is zero.
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
    """Of which parameters the sums were none among equals, as the device notes it.

    Parameters
    ----------
    names
        Of the parameters.
    device
        Where they are.
    refusal
        The message; ``{names}`` stands for the parameters.
    """

    def __init__(self, names: Sequence[str], device: torch.device, refusal: str) -> None:
        self.names, self._refusal = names, refusal
        self.found = torch.zeros(len(names), dtype=torch.bool, device=device)
        self._copy = torch.zeros(len(names), dtype=torch.bool, pin_memory=True) if is_gpu(device) else self.found
        self._copied: torch.cuda.Event | None = None

    def note(self, first: int, differ: Tensor) -> None:
        """Note what differs, from a parameter on; on a CPU it is refused at once."""
        self.found.narrow(0, first, len(differ)).logical_or_(differ)
        if not on_gpu(self.found):
            self.look()

    def look(self) -> None:
        """Refuse what has been noted; waits for nothing.

        Raises
        ------
        ParallelError
            If processes have added what does not belong together.
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
    """Return how a gradient lies in memory: small numbers, whose sums are exact in 16 bits too."""
    if parameter.is_contiguous():
        return 1
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.ndim)
    return 2 if channels_last is not None and parameter.is_contiguous(memory_format=channels_last) else 3
