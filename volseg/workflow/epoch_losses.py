"""The losses of the epoch that is being trained: they stay on the device, and are looked at now and then."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from volseg.errors import NonFiniteLossError
from volseg.losses.overlap import compute_soft_dice

__all__ = ["CHECK_EVERY", "NORM", "OVERLAP", "EpochLosses"]

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
