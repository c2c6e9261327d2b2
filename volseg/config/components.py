"""Config sections of the named components of a training: network, losses, metrics, optimizer and schedule."""

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from volseg.config.base import ClassWeight, ComponentConfig, Finite

BATCH_FIELDS = frozenset({"image", "label"})
"""Fields of a batch besides the names of its cases."""


class NetworkConfig(ComponentConfig):
    """The network."""

    outputs: Annotated[tuple[str, ...], Field(min_length=1)] = ("logits",)
    """Names of the returned tensors, in order, for losses to read; predictions use ``logits``."""

    @model_validator(mode="after")
    def _has_logits(self) -> Self:
        if "logits" not in self.outputs or len(set(self.outputs)) < len(self.outputs):
            raise ValueError(f"outputs must be different names, logits among them, got {list(self.outputs)}")
        if taken := sorted(BATCH_FIELDS & {*self.outputs}):
            raise ValueError(f"outputs cannot be called {taken[0]}, as a field of the batch is")
        return self


class OptimizerConfig(ComponentConfig):
    """The optimizer."""

    parts: dict[str, Annotated[dict[str, Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Other settings for parts of the network, such as ``{"output*": {lr: 1e-2}}``, by patterns of parameter names;
    ``*`` matches any characters."""


class LossConfig(ComponentConfig):
    """One term of the objective, which is the sum of all terms times their factors."""

    factor: Finite = 1.0
    """Factor of the term in the sum."""
    weight: tuple[ClassWeight, ...] | None = None
    """One weight per class, for losses that take class weights."""
    inputs: Annotated[tuple[str, ...], Field(min_length=1)] = ("logits", "label")
    """Arguments of the loss: fields of the batch and outputs of the network."""
    output: str = "loss"
    """Name of the term's value. Several terms need different names; ``loss`` is then their sum."""

    @field_validator("weight", mode="before")
    @classmethod
    def _is_no_factor(cls, value: Any) -> Any:
        """Refuse a single number, which probably means ``factor``."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"needed: a list of class weights; for the term's share of the sum write factor: {value}")
        return value

    def spec(self) -> dict[str, Any]:
        """Return name and parameters for the registry of losses, class weights included."""
        return {**super().spec(), **({} if self.weight is None else {"weight": list(self.weight)})}


class MetricConfig(ComponentConfig):
    """A further metric of the validation besides Dice, for the foreground on the original grid, in mm."""

    inputs: tuple[str, ...] = ("pred", "label")
    """Arguments of the metric: the prediction ``pred`` and fields of the case."""
    output: str
    """Name of the value in TensorBoard and in the records."""


class ScheduleConfig(ComponentConfig):
    """Learning rate over the course of the training."""

    name: str = "polynomial"
    """``polynomial``, ``cosine``, ``constant``, or a custom schedule."""
    power: float | None = None
    """Exponent of ``polynomial``; null means 0.9."""
    floor: float | None = None
    """Final learning rate of ``cosine`` as a fraction of the peak; null means 0."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training over which the rate rises linearly to its peak."""

    def spec(self) -> dict[str, Any]:
        """Return name and parameters for the registry of schedules."""
        return self.model_dump(exclude_none=True, exclude={"warmup"})
