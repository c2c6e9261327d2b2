"""Let one process of a spatial group read, augment, score and write; the others compute on the slabs that it sends.

If a model is cut over processes (``torchrun``), every process runs the same network calls in the same order. The
leading process makes the batches and volumes. The others follow: they wait for the next volume, run the model on their
slab, and stop at a message without a volume.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn

from volseg.data.augmented import EpochBatches
from volseg.data.cases import Batch
from volseg.inference.predictor import full_logits
from volseg.parallel import ModelParallel
from volseg.parallel.batches import scatter_batch
from volseg.parallel.processes.progress import describe_error, told_error
from volseg.workflow.interrupts import StopRequested
from volseg.workflow.validation import Example, Validated


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
        """Return the model's output on an image ``(B, C, D, H, W)`` that only this process holds."""
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
            In every process, if the leading one was asked to stop.
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
