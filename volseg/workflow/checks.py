"""Check a training between batches: its losses, its seconds, and whether a signal asks it to stop.

An epoch's losses stay on the device. Signals are recorded, so that a training stops between two batches instead of
within one.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor

from volseg.errors import NonFiniteLossError
from volseg.losses.dice_cross_entropy import compute_soft_dice
from volseg.parallel.processes.group import largest_over_processes
from volseg.signals import ENDING, ONE_EVENT_SECONDS, raise_as_signal

CHECK_EVERY = 32
"""Batches between two checks of the losses on a GPU; on a CPU every batch is checked, at no cost."""


NORM = "(gradient norm)"
"""Key of the gradient norm among a batch's losses; no loss has this name. The norm is not finite if the batch completes
no step, or if the float16 scaler skips the step."""

OVERLAP = "(foreground overlap)"
"""Key of a batch's sums, from which the soft Dice of an epoch's foreground is computed."""


class EpochLosses:
    """Losses and cases of an epoch, batch by batch.

    Parameters
    ----------
    names : sequence of str
        Names of the losses.
    epoch : int
        Number of the epoch, from 0; messages count from 1.
    losses : iterable of mapping
        Losses of the completed batches, if a training resumes within an epoch; already checked.
    cases : iterable of sequence of str
        Cases of the completed batches.
    gather : callable
        Maps this process's cases of a batch to the cases of all processes that share the batch, for a message; every
        process calls it.
    """

    def __init__(
        self,
        names: Sequence[str],
        epoch: int = 0,
        losses: Iterable[Mapping[str, Tensor]] = (),
        cases: Iterable[Sequence[str]] = (),
        gather: Callable[[Sequence[str]], Sequence[str]] = tuple,
    ) -> None:
        self.names = names
        self.epoch = epoch
        self.losses = [dict(batch) for batch in losses]
        self.cases = [tuple(names) for names in cases]
        self._gather = gather
        self._num_checked = len(self.losses)

    def begin_batch(self, cases: Sequence[str]) -> None:
        """Record the cases of the next batch."""
        self.cases.append(tuple(cases))

    def add(
        self, losses: Mapping[str, Tensor], gradient_norm: Tensor | None = None, overlap: Tensor | None = None
    ) -> None:
        """Keep the losses and the overlap of a batch, and the gradient norm if the batch completed a step."""
        if gradient_norm is None:  # same names for every batch: a checkpoint stores one tensor per name
            gradient_norm = torch.full_like(next(iter(losses.values())), math.nan, dtype=torch.float32)
        self.losses.append({**losses, NORM: gradient_norm, **({} if overlap is None else {OVERLAP: overlap})})

    def require_finite(self, losses: Mapping[str, Tensor]) -> None:
        """Check the losses of the current batch.

        Raises
        ------
        NonFiniteLossError
            If one is not finite.
        """
        self._refuse_not_finite(len(self.losses), {name: value.item() for name, value in losses.items()})

    def look(self) -> dict[str, float]:
        """Check the losses since the last check; return the newest losses, or an empty dict.

        Raises
        ------
        NonFiniteLossError
            If one is not finite.
        """
        for number in range(self._num_checked, len(self.losses), CHECK_EVERY):
            fresh = self.losses[number : number + CHECK_EVERY]
            values = torch.stack([torch.stack([losses[name].float() for name in self.names]) for losses in fresh])
            for offset, row in enumerate(values.tolist()):
                self._refuse_not_finite(number + offset, dict(zip(self.names, row, strict=True)))
        self._num_checked = len(self.losses)
        return {name: float(self.losses[-1][name]) for name in self.names} if self.losses else {}

    def compute_means(self) -> dict[str, float]:
        """Return the mean of each loss over the epoch."""
        stacked = {name: torch.stack([batch[name] for batch in self.losses]) for name in self.names}
        return {name: values.float().mean().item() for name, values in stacked.items()}

    def compute_mean_norm(self) -> float | None:
        """Return the mean norm of the epoch's gradients; None without a finite one."""
        norms = [batch[NORM] for batch in self.losses if NORM in batch]
        values = [value for value in torch.stack(norms).tolist() if math.isfinite(value)] if norms else []
        return math.fsum(values) / len(values) if values else None

    def compute_soft_dice(self) -> float | None:
        """Return the soft Dice of the foreground over all batches; None without overlaps."""
        sums = [batch[OVERLAP] for batch in self.losses if OVERLAP in batch]
        return compute_soft_dice(torch.stack(sums).double().sum(0)) if sums else None

    def _refuse_not_finite(self, number: int, values: Mapping[str, float]) -> None:
        if not all(map(math.isfinite, values.values())):
            cases = ", ".join(self._gather(self.cases[number])) or "(the batch has no field `case`)"
            raise NonFiniteLossError(
                f"the loss is not finite in epoch {self.epoch + 1}, batch {number + 1}: {values}; cases: {cases}. "
                "Check the images of these cases first (`volseg data check` finds NaN and huge values), then lower "
                "the learning rate or set training.clip. The checkpoints are unaffected"
            )


# The seconds of an epoch over all interruptions, and the part of them spent waiting for batches.


class EpochClock:
    """Elapsed seconds of an epoch.

    Call `count` before reading within an epoch, for a checkpoint or after an error: ``waited`` must never exceed
    ``seconds``.

    Parameters
    ----------
    seconds, waited : float
    """

    def __init__(self, seconds: float = 0.0, waited: float = 0.0) -> None:
        self.seconds, self.waited = seconds, waited
        self.begin()

    def begin(self) -> None:
        """Start counting the seconds of the epoch."""
        self._turned = time.perf_counter()

    def count(self) -> float:
        """Add the seconds since the last call; return the current time."""
        before, self._turned = self._turned, time.perf_counter()
        self.seconds += self._turned - before
        return self._turned

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds inside the context as waiting, too."""
        asked = self.count()
        yield
        self.waited += self.count() - asked


# Record signals, and agree over all processes on whether one arrived.


_listening: list["Interruption"] = []
"""Active `catch_signals` contexts, the innermost last; global, as signals belong to the process."""


class StopRequested(Exception):  # noqa: N818  (not an error: the work can be repeated)
    """A signal arrived during a long task, such as a validation, that a resumed training repeats."""


def stop_if_requested() -> None:
    """Raise if a signal was caught, between two parts of a long task; do nothing outside `catch_signals`.

    Raises
    ------
    StopRequested
        The caller that catches the signals must catch it.
    """
    if _listening and _listening[-1]:
        raise StopRequested


def request_stop() -> None:
    """Ask this process to stop, from any thread, like SIGTERM; a later SIGTERM counts as the first signal."""
    if _listening:
        _listening[-1].take(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


class Interruption:
    """The signal that arrived, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def take(self, number: int) -> None:
        """Adopt a signal that another process of the job received; 0 means none."""
        if number:
            self.signal = signal.Signals(number)

    def raise_as_signal(self) -> None:
        """Raise the exception of the received signal; do nothing without a signal."""
        if self.signal is not None:
            raise_as_signal(self.signal)


@contextmanager
def catch_signals() -> Iterator[Interruption]:
    """Record the first signal of `ENDING`; a second one acts at once, with the former handler.

    Python delivers signals to the main thread only; elsewhere the context does nothing. An ignored SIGHUP (``nohup``)
    stays ignored.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    # Python can neither name nor restore a handler that C installed.
    before = {number: handler for number in ENDING if (handler := signal.getsignal(number)) is not None}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    received: list[float] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def record(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(time.monotonic())
        if received[-1] - received[0] > ONE_EVENT_SECONDS:
            restore()
            signal.raise_signal(number)
        elif not interruption:
            interruption.signal = signal.Signals(number)

    for number in before:
        signal.signal(number, record)
    _listening.append(interruption)
    try:
        yield interruption
    finally:
        _listening.remove(interruption)
        restore()


class LookInterval:
    """Number of batches between two checks for signals, adapted so that they take about two seconds.

    On a GPU a check waits for the device, which lags behind: more checks cost time, fewer delay the response to a
    signal.

    Parameters
    ----------
    most : int
        Largest number of batches between two checks.
    seconds : float
        Longest time between two checks.
    """

    def __init__(self, most: int, seconds: float = 2.0) -> None:
        self.most = most
        self.seconds = seconds
        self.batches = 1  # the first batch's duration is unknown
        self.begin()

    def begin(self) -> None:
        """Start to count and time batches."""
        self._begin = time.perf_counter()
        self._count = 0

    def count(self) -> None:
        """Count a batch."""
        self._count += 1

    @property
    def is_due(self) -> bool:
        """Whether the next check is due."""
        return self._count >= self.batches

    def measure(self) -> float:
        """Return the mean seconds per batch since the last check; call right after a wait for the device."""
        return (time.perf_counter() - self._begin) / max(self._count, 1)

    def adapt(self, seconds_per_batch: float) -> None:
        """Choose the next interval from the slowest process's time."""
        self.batches = max(1, min(self.most, int(self.seconds / max(seconds_per_batch, 1e-9))))
        self.begin()


class Stopping:
    """Agree over all processes of a job on whether a signal arrived.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self.interval = LookInterval(CHECK_EVERY if device.type == "cuda" else 1)
        self._interruption = Interruption()
        self._device = device

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Catch signals inside the context."""
        with catch_signals() as self._interruption:
            yield

    def raise_as_signal(self) -> None:
        """Raise the exception of the received signal; do nothing without a signal."""
        self._interruption.raise_as_signal()

    def agree(self, seconds_per_batch: float | None = None) -> bool:
        """Return whether a signal arrived at any process of the job.

        If ``seconds_per_batch`` is given, all processes choose the same next interval, from the slowest process's time.
        """
        # One number, for one collective. The signal has the high bits: it ends the run whatever the time is.
        microseconds = min(int(1e6 * (seconds_per_batch or 0.0)), 2**40 - 1)
        largest = largest_over_processes((self._interruption.signal or 0) * 2**40 + microseconds, self._device)
        number, slowest = divmod(largest, 2**40)
        self._interruption.take(number)
        if seconds_per_batch is not None:
            self.interval.adapt(slowest / 1e6)
        return bool(self._interruption)
