"""What a training is between two batches: the one place that knows what a checkpoint holds, and under which names."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from volseg.errors import CheckpointError
from volseg.workflow.records import EpochRecord

__all__ = ["FORMAT", "TrainingState"]

FORMAT = 2
"""Of a checkpoint's content. In format 1 the metadata lay beside the state, under names of their own."""

ADDED_LATER = {"seconds": (0.0, 0.0)}
"""What the first checkpoints of format 1 lack, and what stands for it."""


@dataclass(frozen=True, kw_only=True)
class TrainingState(Mapping[str, Any]):
    """Everything from which a training goes on as if it had not been interrupted.

    Tensors are the training's own, not copies, until the state is written. For one release it is also read as the dict
    that a checkpoint of format 1 was.
    """

    model: Mapping[str, Any]
    """The network's ``state_dict``, under the plain network's names."""
    optimizer: Mapping[str, Any]
    """The optimizer's ``state_dict``, its learning rates numbers."""
    steps_done: int
    """Optimizer steps, from which the learning rate follows."""
    scaler: Mapping[str, Any]
    """State of the gradient scaler; empty unless the precision is float16."""
    average: Mapping[str, Any] | None
    """The averaged weights; see `WeightAverage.state_dict`. None where there are none."""
    random: Mapping[str, Any]
    """State of every random number generator; see `random_state`."""
    epoch: int
    """Epochs completed."""
    position: int
    """Batches completed in the epoch after them."""
    losses: Sequence[Mapping[str, Tensor]]
    """Of each of these batches."""
    cases: Sequence[Sequence[str]]
    """In each of these batches."""
    seconds: tuple[float, float]
    """Time of these batches, and the part of it that was spent waiting for them."""
    history: tuple[EpochRecord, ...]
    """Of every completed epoch."""
    best: EpochRecord | None
    """The epoch with the best score."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that whoever wrote the checkpoint put beside the state, such as the config."""

    @property
    def progress(self) -> tuple[int, int]:
        """Epochs completed, and batches completed after them: what is further along is larger."""
        return self.epoch, self.position

    def as_checkpoint(self) -> dict[str, Any]:
        """Return the state as tensors and plain values; `from_checkpoint` takes it back."""
        content = {known.name: getattr(self, known.name) for known in fields(self)}
        return {
            **content,
            "losses": list(self.losses),
            "seconds": list(self.seconds),
            "cases": [list(cases) for cases in self.cases],
            "history": [record.as_dict() for record in self.history],
            "best": self.best.as_dict() if self.best else None,
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_checkpoint(cls, content: "Mapping[str, Any] | TrainingState", source: object) -> "TrainingState":
        """Return the state that a checkpoint holds; ``source`` is named in errors (the file).

        Raises
        ------
        CheckpointError
            If something is missing, of the wrong kind, or not known.
        """
        if isinstance(content, TrainingState):
            return content
        content = dict(content)
        layout = content.pop("format", None)
        names = {known.name for known in fields(cls)}
        beside: dict[str, Any] = {}
        if layout is None or layout < FORMAT:
            # Without a format it is a `state_dict`, to which somebody may have added values.
            own = names if layout is None else names - {"metadata"}
            beside = {name: content.pop(name) for name in [*content] if name not in own}
            content = {**ADDED_LATER, "metadata": {}, **content}
        if content.keys() != names:
            missing, surplus = sorted(names - content.keys()), sorted(map(str, content.keys() - names))
            raise CheckpointError(
                f"{source} holds no training state of format {FORMAT}: it lacks {missing or 'nothing'} and has "
                f"{surplus or 'nothing'} besides; name a checkpoint that `volseg train` wrote, or update volseg"
            )
        try:
            return cls(**{**content, **_typed(content, beside)})
        except (AttributeError, KeyError, TypeError, ValueError) as fault:
            raise CheckpointError(f"{source} holds a training state with values that are none: {fault}") from fault

    def _as_format_1(self) -> dict[str, Any]:
        """Return the content of a checkpoint of format 1, which `from_checkpoint` takes too."""
        content = self.as_checkpoint()
        return {"format": 1, **content.pop("metadata"), **content}

    def __getitem__(self, name: str) -> Any:
        """Read the state as the dict that a checkpoint was before."""
        value = self._as_format_1()[name]
        place = f"metadata[{name!r}]" if name in self.metadata else name
        advice = "only a file has a format" if name == "format" else f"read .{place} instead of [{name!r}]"
        warnings.warn(f"a checkpoint is a TrainingState now: {advice}", FutureWarning, stacklevel=2)
        return value

    def __iter__(self) -> Iterator[str]:
        """Go through the names that a checkpoint had before; reading one of them says what to read instead."""
        return iter(self._as_format_1())

    def __len__(self) -> int:
        """Return how many names a checkpoint had before."""
        return len(self._as_format_1())


def _typed(content: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not stored as it is used, and the numbers that decide where a training goes on.

    ``beside`` are values that lay beside the state, and belong to its metadata.
    """
    seconds, waited = content["seconds"]
    return {
        "steps_done": _count(content["steps_done"]),
        "epoch": _count(content["epoch"]),
        "position": _count(content["position"]),
        "seconds": (float(seconds), float(waited)),
        "history": tuple(EpochRecord(**record) for record in content["history"]),
        "best": None if content["best"] is None else EpochRecord(**content["best"]),
        "metadata": {**content["metadata"], **beside},
    }


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"a count is a whole number of 0 or more, got {value!r}")
    return value
