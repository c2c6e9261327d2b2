"""Share batches, volumes and validations among the processes of a job.

If a model is cut over processes (``torchrun``), every process runs the same network calls in the same order. The
leading process reads, augments, scores and writes: it makes the batches and volumes. The others follow: they wait for
the next volume, run the model on their slab, and stop at a message without a volume.

A validation can also be spread: each process scores some cases, and all get all scores. The numbers travel as JSON
without loss, and are sorted in the order of the cases before they are averaged. The scores thus equal those of a single
process, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from volseg.data.augmented import EpochBatches
from volseg.data.cases import Batch
from volseg.errors import DataError
from volseg.inference.window_step import full_logits
from volseg.parallel import ModelParallel
from volseg.parallel.batches import scatter_batch
from volseg.parallel.processes.progress import Rounds, describe_error, run_together, told_error
from volseg.workflow.checks import StopRequested, stop_if_requested
from volseg.workflow.validation import Example, JudgedCase, Validated, Validation


def is_cut_over_processes(model: nn.Module) -> TypeGuard[ModelParallel]:
    """Return whether volumes of ``model`` are sharded over several processes."""
    return isinstance(model, ModelParallel) and model.strategy.is_shared


class GroupBatches:
    """Send every process its slabs of each batch; only the leading process makes batches.

    Parameters
    ----------
    model : ModelParallel
        Defines which processes share a volume.
    batches : EpochBatches or None
        On the leading process; None on the others.
    length : int
        Batches per epoch.
    batch_size : int, optional
        Samples of a whole batch, if replicas share it.
    """

    def __init__(
        self, model: ModelParallel, batches: EpochBatches | None, length: int, *, batch_size: int | None = None
    ) -> None:
        self.model = model
        self.batches = batches
        self.length = length
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.length

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield this process's part of each batch of epoch ``number`` from batch ``start`` on."""
        own = repeat(None, self.length - start) if self.batches is None else self.batches.epoch(number, start=start)
        for batch in own:
            yield scatter_batch(self.model, batch)


_in_pass: WeakSet[ModelParallel] = WeakSet()
"""Models in a forward pass with their followers, and models whose pass an error ended."""


class FollowedModel(nn.Module):
    """Send each volume to the followers, then run the model, in the leading process."""

    def __init__(self, model: ModelParallel) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Any:
        """Return the model's output on an image ``(B, C, D, H, W)`` that only this process has."""
        _in_pass.add(self.model)
        result = self.model(scatter_batch(self.model, {"image": image})["image"])
        _in_pass.discard(self.model)  # not after an error: the followers are still in the pass and receive no message
        return result


@torch.no_grad()
def follow(model: ModelParallel, autocast: torch.dtype | None = None) -> Batch:
    """Run the model on this process's slab of every volume; return the message that ends the loop.

    Parameters
    ----------
    model : ModelParallel
        In the same mode as in the leading process.
    autocast : torch.dtype, optional
        As in the leading process's `Predictor`.
    """
    device_type = next(model.parameters()).device.type
    while "image" in (batch := scatter_batch(model, None)):
        with torch.autocast(device_type, dtype=autocast, enabled=autocast is not None):
            full_logits(model(batch["image"]))
    return batch


def stop_followers(model: ModelParallel, message: Mapping[str, Any]) -> None:
    """End the other processes' `follow` with a message of plain values."""
    scatter_batch(model, {"ended": True, **message})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The scores of a validation that another process ran."""

    score: float
    scores: Mapping[str, float] = field(default_factory=dict)


class GroupValidation:
    """Run a validation in the leading process, and send its scores to every process.

    Parameters
    ----------
    model : ModelParallel
        The model that is validated.
    validation : callable or None
        On the leading process, with a `FollowedModel` in its predictor; None on the others.
    autocast : torch.dtype, optional
        As in that predictor.
    """

    def __init__(
        self, model: ModelParallel, validation: Callable[[], Validated] | None, autocast: torch.dtype | None
    ) -> None:
        self.model = model
        self.validation = validation
        self.autocast = autocast

    @property
    def examples(self) -> list[Example]:
        """Example cases of the leading process."""
        return getattr(self.validation, "examples", [])

    def __call__(self) -> Validated | Verdict:
        """Validate, or follow.

        Raises
        ------
        StopRequested
            In every process, if the leading process received a request to stop.
        Exception
            Error of the validation; in the followers as `told_error` returns it.
        """
        if self.validation is None:
            message = follow(self.model, self.autocast)
            if message.get("stopped"):
                raise StopRequested
            if "failed" in message:
                raise told_error(message["failed"], f"process {self.model.strategy.volumes.first_process}")
            return Verdict(score=message["score"], scores=message["scores"])
        _in_pass.discard(self.model)
        try:
            validated = self.validation()
        except StopRequested:
            stop_followers(self.model, {"stopped": True})
            raise
        except Exception as fault:
            if self.model not in _in_pass:
                stop_followers(self.model, {"failed": describe_error(fault)})
            raise
        stop_followers(self.model, {"score": validated.score, "scores": dict(validated.scores)})
        return validated


class SpreadValidation:
    """Validate with a process group: every process scores its own cases.

    Each process writes its own predictions; ``summary.json`` is written by the group's first process. A request to stop
    one process stops all, between two cases; an error in one process is raised in all.

    Parameters
    ----------
    validation : Validation
        Validation of this process's own cases, possibly none.
    order : sequence of str
        Ids of the cases of all processes, in order: `PreparedCases.order`.
    group : ProcessGroup or None
        Gloo group of the processes that share the cases, in exclusive use. All of them call this object. None: only
        this process.

    Examples
    --------
    If the model is cut over processes too, the followers of each process follow as in a validation by one process::

        GroupValidation(model, SpreadValidation(validation, prepared.order, readers.group), predictor.autocast)
    """

    def __init__(self, validation: Validation, order: Sequence[str], group: dist.ProcessGroup | None) -> None:
        self.validation = validation
        self.order = list(order)
        self.group = group

    @property
    def examples(self) -> list[Example]:
        """Example cases of the last call, in the first process; none in the others."""
        return self.validation.examples

    def __call__(self) -> Validated:
        """Score this process's cases; return the result over the cases of all processes.

        Raises
        ------
        StopRequested
            In every process, if one received a request to stop.
        DataError
            If the processes together do not have each case exactly once.
        """
        told = run_together(self.group, self._judge, stops=StopRequested, poll=stop_if_requested)
        judged = [(name, case) for cases in told for name, case in cases]
        names = sorted(name for name, _ in judged)
        if names != sorted(self.order):
            raise DataError(
                f"the processes of a validation must together have each of its {len(self.order)} cases once, got "
                f"{names}; give every process its own share of the cases, and the same order to all"
            )
        by_name = dict(judged)
        return self.validation.conclude([by_name[name] for name in self.order], writes=self._is_first())

    def _is_first(self) -> bool:
        return self.group is None or dist.get_rank(self.group) == 0

    def _judge(self, rounds: Rounds) -> list[tuple[str, JudgedCase]]:
        judged = []
        for each in self.validation.judge(keeps_examples=self._is_first()):
            judged.append(each)
            rounds.count()
            rounds.check()
        return judged
