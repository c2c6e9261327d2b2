"""When a training looks whether it has to stop, and what all processes of its job agree on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from volseg.parallel.processes.group import largest_over_processes
from volseg.workflow.epoch_losses import CHECK_EVERY
from volseg.workflow.interrupts import Interruption, LookInterval, catch_signals

__all__ = ["Stopping"]


class Stopping:
    """A signal that came to any process of the job, and the batches between two looks for one.

    Parameters
    ----------
    device : torch.device
        Of the training; a look at a GPU waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.interval = LookInterval(CHECK_EVERY if device.type == "cuda" else 1)
        self._interruption = Interruption()
        self._device = device

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Catch signals in here."""
        with catch_signals() as self._interruption:
            yield

    def raise_as_signal(self) -> None:
        """End as the signal would have that came, if one did."""
        self._interruption.raise_as_signal()

    def agree(self, seconds_per_batch: float | None = None) -> bool:
        """Tell whether a signal came, to this process or to any other of the job.

        With a time all of them look again after the same number of batches, by the time of the slowest.
        """
        # One number, because it is one collective: signals first, which end the run whatever the time is.
        microseconds = min(int(1e6 * (seconds_per_batch or 0.0)), 2**40 - 1)
        largest = largest_over_processes((self._interruption.signal or 0) * 2**40 + microseconds, self._device)
        number, slowest = divmod(largest, 2**40)
        self._interruption.take(number)
        if seconds_per_batch is not None:
            self.interval.adapt(slowest / 1e6)
        return bool(self._interruption)
