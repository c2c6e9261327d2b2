"""What is counted of the epoch that is being trained: its losses, which stay on the device, and its seconds."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from volseg.errors import NonFiniteLossError
from volseg.losses.overlap import compute_soft_dice

__all__ = ["CHECK_EVERY", "NORM", "OVERLAP", "AsyncLossReader", "EpochClock", "EpochLosses"]


CHECK_EVERY = 32
"""Batches between two looks at the losses on a GPU; on a CPU every batch is looked at, which costs nothing there."""


NORM = "(gradient norm)"
"""Beside a batch's losses, by a name that no loss has. Unlike them it may be no number: of a batch that completes no
step, and of a step that float16 leaves out."""

OVERLAP = "(foreground overlap)"
"""Likewise: the sums of a batch from which the soft Dice of an epoch's foreground follows."""


class EpochLosses:
    """Losses batch by batch, and the cases they are of.

    Parameters
    ----------
    names : sequence of str
        Of the losses.
    epoch : int
        Which epoch it is, counted from 0, for a message, which counts from 1.
    losses : iterable of mapping
        Of the batches that are done, where a training goes on in the middle of an epoch; they have been looked at.
    cases : iterable of sequence of str
        Of these batches.
    gather : callable
        From this process's cases of a batch to those of all that share it; every process calls it, for a message.
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

    @property
    def is_due(self) -> bool:
        """Whether enough batches have gone by to look at their losses."""
        return len(self.losses) - self._num_checked >= CHECK_EVERY

    def begin_batch(self, cases: Sequence[str]) -> None:
        """Note of which cases the losses come next."""
        self.cases.append(tuple(cases))

    def add(
        self, losses: Mapping[str, Tensor], gradient_norm: Tensor | None = None, overlap: Tensor | None = None
    ) -> None:
        """Keep the losses of the batch, its overlap, and the norm of the gradient where it ended a step."""
        if gradient_norm is None:  # every batch has the same names: a checkpoint keeps them as one tensor each
            gradient_norm = torch.full_like(next(iter(losses.values())), math.nan, dtype=torch.float32)
        self.losses.append({**losses, NORM: gradient_norm, **({} if overlap is None else {OVERLAP: overlap})})

    def require_finite(self, losses: Mapping[str, Tensor]) -> None:
        """Look at the losses of the batch that has begun.

        Raises
        ------
        NonFiniteLossError
            If one is not finite.
        """
        self._refuse_not_finite(len(self.losses), {name: value.item() for name, value in losses.items()})

    def look(self) -> dict[str, float]:
        """Look at the losses that came since the last time; return the newest, nothing if there is none.

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
        """Return the soft Dice of the foreground of all batches; None where no loss left their overlap."""
        sums = [batch[OVERLAP] for batch in self.losses if OVERLAP in batch]
        return compute_soft_dice(torch.stack(sums).double().sum(0)) if sums else None

    def _refuse_not_finite(self, number: int, values: Mapping[str, float]) -> None:
        if not all(map(math.isfinite, values.values())):
            cases = ", ".join(self._gather(self.cases[number])) or "(the batch has no field `case`)"
            raise NonFiniteLossError(
                f"the loss is not finite in epoch {self.epoch + 1}, batch {number + 1}: {values}; cases: {cases}. "
                "Look at the images of these cases first (`volseg data check` names NaN and huge values), then lower "
                "the learning rate or set training.clip; the checkpoints are untouched"
            )


# Losses for display, from the first step on: they come from the device when they come, and nobody waits for them.


EVERY_SECONDS = 0.5
"""Between two copies: more could not be read, and each takes some ten microseconds of the host."""


class AsyncLossReader:
    """The losses of one of the last batches, copied beside what a GPU computes; on a CPU they are there at once."""

    def __init__(self) -> None:
        self._next = 0.0
        self._on_the_way: tuple[list[str], Tensor, torch.cuda.Event] | None = None

    def exchange(self, losses: Mapping[str, Tensor]) -> dict[str, float] | None:
        """Take the losses of a batch; return those of a batch before that have arrived, or None.

        Parameters
        ----------
        losses : mapping
            Scalars by name, on the device, where later steps do not overwrite them.
        """
        if not any(value.is_cuda for value in losses.values()):
            return {name: float(value) for name, value in losses.items()}
        arrived = self._take()
        now = time.monotonic()
        if self._on_the_way is None and now >= self._next:
            self._next = now + EVERY_SECONDS
            self._send(losses)
        return arrived

    def _send(self, losses: Mapping[str, Tensor]) -> None:
        # One copy, into pinned memory: from pageable memory it would wait for the device.
        stacked = torch.stack([value.detach().float().reshape(()) for value in losses.values()])
        arriving = torch.empty(len(losses), pin_memory=True)
        arriving.copy_(stacked, non_blocking=True)
        event = torch.cuda.current_stream(stacked.device).record_event()
        self._on_the_way = list(losses), arriving, event

    def _take(self) -> dict[str, float] | None:
        if self._on_the_way is None:
            return None
        names, values, event = self._on_the_way
        if not event.query():
            return None
        self._on_the_way = None
        return dict(zip(names, values.tolist(), strict=True))


# The seconds of an epoch, over all interruptions, and those of them that went by waiting for batches.


class EpochClock:
    """What an epoch has taken so far.

    Whoever asks in the middle of an epoch, a checkpoint or the end by an error, must not find the seconds spent waiting
    there without those in which they lie: `count` before.

    Parameters
    ----------
    seconds, waited : float
        Of the epoch's beginning, before an interruption.
    """

    def __init__(self, seconds: float = 0.0, waited: float = 0.0) -> None:
        self.seconds, self.waited = seconds, waited
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._turned = time.perf_counter()

    def count(self) -> float:
        """Add what went by since the last time; return the time of now."""
        before, self._turned = self._turned, time.perf_counter()
        self.seconds += self._turned - before
        return self._turned

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what goes by in here as spent waiting, too."""
        asked = self.count()
        yield
        self.waited += self.count() - asked
