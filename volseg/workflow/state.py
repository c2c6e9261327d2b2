"""What a training is between two batches: the one place that knows what a checkpoint holds, and under which names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from volseg.errors import CheckpointError
from volseg.workflow.records import EpochRecord

__all__ = ["FORMAT", "TrainingState"]

FORMAT = 2
"""Of a checkpoint's content."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything from which a training goes on as if it had not been interrupted.

    Tensors are the training's own, not copies, until the state is written.
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
    def averaged(self) -> Mapping[str, Tensor] | None:
        """Average of each parameter, under one of its names; None where there are none."""
        return None if self.average is None else self.average["average"]

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
        if layout is None:  # it is a `state_dict`, to which somebody may have added values
            beside = {name: content.pop(name) for name in [*content] if name not in names}
            content = {"metadata": {}, **content}
        if content.keys() != names:
            missing, surplus = sorted(names - content.keys()), sorted(map(str, content.keys() - names))
            raise CheckpointError(
                f"{source} holds no training state of format {FORMAT}: it lacks {missing or 'nothing'} and has "
                f"{surplus or 'nothing'} besides; name a checkpoint that `volseg train` wrote, or update volseg"
            )
        read = {name: _read(name, content[name], source) for name in READERS}
        return cls(**{**content, **read, "metadata": {**read["metadata"], **beside}})


def _read(name: str, value: Any, source: object) -> Any:
    """Return what is stored under ``name`` as it is used, or tell what it is instead."""
    try:
        return READERS[name](value)
    except (AttributeError, KeyError, TypeError, ValueError) as fault:
        raise CheckpointError(f"{source} holds a training state with values that are none: {name}: {fault}") from fault


def _named(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"values by name were expected, got {_kind(value)}")
    return value


def _tensors(value: Any) -> Mapping[str, Tensor]:
    if odd := [name for name, tensor in _named(value).items() if not isinstance(tensor, Tensor)]:
        raise TypeError(f"tensors by name were expected, got {_kind(value[odd[0]])} for {odd[0]}")
    return value


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"a list was expected, got {_kind(value)}")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"a count is a whole number of 0 or more, got {value!r}")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"a number was expected, got {_kind(value)}")
    return float(value)


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _optimizer(value: Any) -> Mapping[str, Any]:
    if not isinstance(_named(value)["state"], Mapping):
        raise TypeError(f"a state by parameter was expected, got {_kind(value['state'])}")
    for group in _listed(value["param_groups"]):
        _listed(_named(group)["params"])
    return value


def _average(value: Any) -> Mapping[str, Any] | None:
    if value is not None:
        _count(_named(value)["updates"])
        _tensors(value["average"])
    return value


def _seconds(value: Any) -> tuple[float, float]:
    spent, waited = _listed(value)
    return _number(spent), _number(waited)


def _names(value: Any) -> Sequence[str]:
    if odd := [name for name in _listed(value) if not isinstance(name, str)]:
        raise TypeError(f"the name of a case was expected, got {_kind(odd[0])}")
    return value


def _record(value: Any) -> EpochRecord:
    record = EpochRecord(**_named(value))
    _count(record.epoch)
    for numbers in (record.losses, record.scores):
        for number in _named(numbers).values():
            _number(number)
    for number in (record.learning_rate, record.seconds, record.seconds_waited, record.score or 0.0):
        _number(number)
    return record


READERS: Mapping[str, Callable[[Any], Any]] = {
    "model": _named,  # a network may keep more than tensors; it knows itself what it takes back
    "optimizer": _optimizer,
    "steps_done": _count,
    "scaler": _named,
    "average": _average,
    "random": _named,
    "epoch": _count,
    "position": _count,
    "losses": lambda value: [_tensors(batch) for batch in _listed(value)],
    "cases": lambda value: [_names(batch) for batch in _listed(value)],
    "seconds": _seconds,
    "history": lambda value: tuple(_record(record) for record in _listed(value)),
    "best": lambda value: None if value is None else _record(value),
    "metadata": _named,
}
"""How each part of a state is read from what was stored."""
