"""Define the state of a training between two batches: the content of a checkpoint, and how to read it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from volseg.errors import CheckpointError

FORMAT = 2
"""Number of the layout of a checkpoint file."""

CLOCKED = ("seconds", "seconds_waited", "seconds_validating", "voxels_per_second")
"""Fields of an `EpochRecord` that depend on the wall clock; the others are equal in two runs of the same config."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Numbers of one epoch."""

    epoch: int
    """Index in ``training.history``, from 0. Numbers for users (display, logs, files) count from 1."""
    losses: Mapping[str, float]
    """Mean of every loss field over the epoch's batches; ``loss`` is the minimised weighted sum."""
    learning_rate: float
    """Learning rate of the first parameter group, at the end of the epoch."""
    seconds: float
    """Wall-clock time of the epoch's batches, without validation."""
    seconds_waited: float
    """Part of ``seconds`` in which the loop waited for its next batch."""
    score: float | None = None
    """Score of the validation (foreground mean Dice); None if the epoch was not validated."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the validation by name (Dice per label)."""
    peak_bytes: int | None = None
    """Most device memory allocated so far; None on CPU."""
    batches: int = 0
    """Number of batches in ``seconds``; 0 in records of an older volseg."""
    seconds_validating: float = 0.0
    """Wall-clock time of the epoch's validation."""
    voxels_per_second: float | None = None
    """Training voxels of all processes, divided by ``seconds``; None if a batch has no image."""
    gradient_norm: float | None = None
    """Mean gradient norm before clipping over the epoch's optimizer steps. Steps that the float16 scaler skips are not
    counted."""
    soft_dice: float | None = None
    """Soft Dice of the training's probabilities over the voxels of all batches, mean of the foreground classes.
    `volseg.losses.DiceCELoss` counts only its known voxels. None without label maps or foreground."""

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain Python values."""
        return asdict(self)


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _named(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"values by name were expected, got {_kind(value)}")
    return value


def _tensors(value: Any) -> Mapping[str, Tensor]:
    if odd := [name for name, tensor in _named(value).items() if not isinstance(tensor, Tensor)]:
        raise TypeError(f"tensors by name were expected, got {_kind(value[odd[0]])} for {odd[0]}")
    return value


def _list(value: Any) -> Sequence[Any]:
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


def _optimizer(value: Any) -> Mapping[str, Any]:
    if not isinstance(_named(value)["state"], Mapping):
        raise TypeError(f"a state by parameter was expected, got {_kind(value['state'])}")
    for group in _list(value["param_groups"]):
        _list(_named(group)["params"])
    return value


def _average(value: Any) -> Mapping[str, Any] | None:
    if value is not None:
        _count(_named(value)["updates"])
        _tensors(value["average"])
    return value


def _seconds(value: Any) -> tuple[float, float]:
    spent, waited = _list(value)
    return _number(spent), _number(waited)


def _names(value: Any) -> Sequence[str]:
    if odd := [name for name in _list(value) if not isinstance(name, str)]:
        raise TypeError(f"the name of a case was expected, got {_kind(odd[0])}")
    return value


def _record(value: Any) -> EpochRecord:
    record = EpochRecord(**_named(value))
    _count(record.epoch)
    numbers = (record.learning_rate, record.seconds, record.seconds_waited, record.score or 0.0)
    for number in (*_named(record.losses).values(), *_named(record.scores).values(), *numbers):
        _number(number)
    return record


def _part(read: Callable[[Any], Any], holds: str) -> dict[str, Any]:
    """Describe a part of a checkpoint: the function that reads the stored value, and the content."""
    return {"read": read, "holds": holds}


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that a training needs to resume exactly.

    The fields are the keys of a checkpoint; each has a description and a function that reads it. Tensors are the
    training's own, not copies, until the state is written.
    """

    # A network may store more than tensors, and checks its own state.
    model: Mapping[str, Any] = field(metadata=_part(_named, "weights and buffers, by the names of the plain network"))
    optimizer: Mapping[str, Any] = field(metadata=_part(_optimizer, "momenta and settings of the optimizer"))
    steps_done: int = field(metadata=_part(_count, "optimizer steps, which give the learning rate"))
    scaler: Mapping[str, Any] = field(metadata=_part(_named, "scale of the gradients; empty without float16"))
    average: Mapping[str, Any] | None = field(
        metadata=_part(_average, "averaged weights and the number of updates; none without `training.ema`")
    )
    random: Mapping[str, Any] = field(
        metadata=_part(_named, "random number generators of Python, NumPy and torch, on the CPU and on each GPU")
    )
    epoch: int = field(metadata=_part(_count, "completed epochs"))
    position: int = field(metadata=_part(_count, "completed batches of the current epoch"))
    losses: Sequence[Mapping[str, Tensor]] = field(
        metadata=_part(lambda value: [_tensors(batch) for batch in _list(value)], "losses of each of these batches")
    )
    cases: Sequence[Sequence[str]] = field(
        metadata=_part(lambda value: [_names(batch) for batch in _list(value)], "cases of each of these batches")
    )
    seconds: tuple[float, float] = field(
        metadata=_part(_seconds, "seconds of these batches, and the seconds of waiting for them")
    )
    history: tuple[EpochRecord, ...] = field(
        metadata=_part(lambda value: tuple(map(_record, _list(value))), "numbers of each completed epoch")
    )
    best: EpochRecord | None = field(
        metadata=_part(lambda value: None if value is None else _record(value), "numbers of the best epoch")
    )
    metadata: Mapping[str, Any] = field(
        default_factory=dict, metadata=_part(_named, "plain values of the writer; `volseg train` keeps the config here")
    )

    @property
    def averaged(self) -> Mapping[str, Tensor] | None:
        """Average of each parameter, under one of its names; None without averages."""
        return None if self.average is None else self.average["average"]

    @property
    def progress(self) -> tuple[int, int]:
        """Completed epochs, and completed batches of the current epoch; the larger pair is further along."""
        return self.epoch, self.position

    def as_checkpoint(self) -> dict[str, Any]:
        """Return the state as tensors and plain values; `from_checkpoint` reads them."""
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
        """Return the state in the content of a checkpoint; errors name ``source`` (the file).

        Raises
        ------
        CheckpointError
            If a part is missing, of the wrong type, or unknown.
        """
        if isinstance(content, TrainingState):
            return content
        content = dict(content)
        layout = content.pop("format", None)
        names = {known.name for known in fields(cls)}
        added: dict[str, Any] = {}
        if layout is None:  # a `state_dict`, to which a user may have added values
            added = {name: content.pop(name) for name in [*content] if name not in names}
            content = {"metadata": {}, **content}
        if content.keys() != names:
            missing, surplus = sorted(names - content.keys()), sorted(map(str, content.keys() - names))
            raise CheckpointError(
                f"{source} holds no training state of format {FORMAT}: it lacks {missing or 'nothing'} and has "
                f"{surplus or 'nothing'} besides; name a checkpoint that `volseg train` wrote, or update volseg"
            )
        for known in fields(cls):
            try:
                content[known.name] = known.metadata["read"](content[known.name])
            except (AttributeError, KeyError, TypeError, ValueError) as fault:
                raise CheckpointError(
                    f"{source} holds a training state with values that are none: {known.name}: {fault}"
                ) from fault
        return cls(**{**content, "metadata": {**content["metadata"], **added}})
