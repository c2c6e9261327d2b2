"""Define the state of a training between two batches: the content of a checkpoint, and how to read it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError
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


KNOWN_ONLY = ConfigDict(extra="forbid")

Count = Annotated[int, Field(ge=0, strict=True)]
Tensors = dict[str, InstanceOf[Tensor]]


def _require_average(value: Any) -> Any:
    is_whole = isinstance(value, dict) and isinstance(value.get("average"), dict) and type(value.get("updates")) is int
    if value is not None and not is_whole:
        raise ValueError("expected the keys average (tensors by name) and updates (a count)")
    return value


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that a training needs to resume exactly.

    The fields are the keys of a checkpoint, which is checked by their types. Tensors are the training's own, not
    copies, until the state is written.
    """

    # A network may store more than tensors, and checks its own state; a `state_dict` has the versions of its modules as
    # an attribute.
    model: InstanceOf[Mapping[str, Any]] = field(
        metadata={"holds": "weights and buffers, by the names of the plain network"}
    )
    optimizer: dict[str, Any] = field(metadata={"holds": "momenta and settings of the optimizer"})
    steps_done: Count = field(metadata={"holds": "optimizer steps, which give the learning rate"})
    scaler: dict[str, Any] = field(metadata={"holds": "scale of the gradients; empty without float16"})
    average: Annotated[dict[str, Tensors | Count] | None, BeforeValidator(_require_average)] = field(
        metadata={"holds": "averaged weights and the number of updates; none without `training.ema`"}
    )
    random: dict[str, Any] = field(
        metadata={"holds": "random number generators of Python, NumPy and torch, on the CPU and on each GPU"}
    )
    epoch: Count = field(metadata={"holds": "completed epochs"})
    position: Count = field(metadata={"holds": "completed batches of the current epoch"})
    losses: Sequence[Tensors] = field(metadata={"holds": "losses of each of these batches"})
    cases: Sequence[Sequence[str]] = field(metadata={"holds": "cases of each of these batches"})
    seconds: tuple[float, float] = field(
        metadata={"holds": "seconds of these batches, and the seconds of waiting for them"}
    )
    history: tuple[EpochRecord, ...] = field(metadata={"holds": "numbers of each completed epoch"})
    best: EpochRecord | None = field(metadata={"holds": "numbers of the best epoch"})
    metadata: dict[str, Any] = field(
        default_factory=dict, metadata={"holds": "plain values from the writer; `volseg train` stores the config here"}
    )

    @property
    def averaged(self) -> Mapping[str, Tensor] | None:
        """Average of each parameter, under one of its names; None without averages."""
        return None if self.average is None else self.average["average"]  # type: ignore[return-value]

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
                f"{source} is not a training state of format {FORMAT}: missing keys {missing or 'none'}, unknown keys "
                f"{surplus or 'none'}; name a checkpoint that `volseg train` wrote, or update volseg"
            )
        for name, kind in _list_kinds():
            try:
                (content[name],) = kind.validate_python((content[name],))
            except ValidationError as fault:
                error = fault.errors(include_url=False)[0]
                place = ".".join(map(str, (name, *error["loc"][1:])))
                raise CheckpointError(
                    f"{source} has an invalid training state: {place}: {error['msg']}, got "
                    f"{type(error['input']).__name__}"
                ) from None
        return cls(**{**content, "metadata": {**content["metadata"], **added}})


@cache
def _list_kinds() -> list[tuple[str, TypeAdapter[Any]]]:
    """Return the type of each part of a checkpoint."""
    # In a tuple: pydantic refuses a config for a dataclass, but the dataclass inherits the config of the tuple.
    hints = get_type_hints(TrainingState, include_extras=True)
    return [(name, TypeAdapter(tuple[hints[name]], config=KNOWN_ONLY)) for name in hints]  # type: ignore[valid-type,name-defined]
