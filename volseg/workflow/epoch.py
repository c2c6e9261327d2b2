"""Keep an epoch's losses, on the device, and measure its seconds."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from volseg.errors import NonFiniteLossError
from volseg.losses.dice_cross_entropy import compute_soft_dice

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
        Of the losses.
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

    @property
    def is_due(self) -> bool:
        """Whether enough batches have passed for the next check of the losses."""
        return len(self.losses) - self._num_checked >= CHECK_EVERY

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
                "Look at the images of these cases first (`volseg data check` names NaN and huge values), then lower "
                "the learning rate or set training.clip; the checkpoints are untouched"
            )


# Losses for display, from the first step on: they are copied asynchronously, and the host never waits for them.


EVERY_SECONDS = 0.5
"""Interval between two copies; each takes some ten microseconds of the host."""


class AsyncLossReader:
    """Read the losses of recent batches from a GPU asynchronously, and from a CPU at once."""

    def __init__(self) -> None:
        self._next = 0.0
        self._on_the_way: tuple[list[str], Tensor, torch.cuda.Event] | None = None

    def exchange(self, losses: Mapping[str, Tensor]) -> dict[str, float] | None:
        """Take the losses of a batch; return the losses of an earlier batch if their copy is complete, or None.

        Parameters
        ----------
        losses : mapping
            Scalars by name, on the device; later steps must not overwrite them.
        """
        if not any(value.is_cuda for value in losses.values()):
            return {name: float(value) for name, value in losses.items()}
        arrived, now = None, time.monotonic()
        if self._on_the_way is not None and self._on_the_way[2].query():
            names, values, _ = self._on_the_way
            self._on_the_way, arrived = None, dict(zip(names, values.tolist(), strict=True))
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


# The seconds of an epoch over all interruptions, and the part of them spent waiting for batches.


class EpochClock:
    """Seconds that an epoch has taken so far.

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
        """Start counting."""
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
