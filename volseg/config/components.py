"""What a training is made of by name: its network, losses, metrics, optimizer and schedule."""

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from volseg.config.base import ClassWeight, ComponentConfig, Finite

__all__ = ["BATCH_FIELDS", "LossConfig", "MetricConfig", "NetworkConfig", "OptimizerConfig", "ScheduleConfig"]

BATCH_FIELDS = frozenset({"image", "label"})
"""What a batch holds besides the names of its cases."""


class NetworkConfig(ComponentConfig):
    """The network."""

    outputs: Annotated[tuple[str, ...], Field(min_length=1)] = ("logits",)
    """Names of what it returns, in its order; losses read them, and ``logits`` is what is predicted with."""

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
    """Other settings for parts of the network, such as ``{"output*": {lr: 1e-2}}``: patterns of parameters' names, in
    which ``*`` stands for anything."""


class LossConfig(ComponentConfig):
    """One term of the objective; several are added up with their factors."""

    factor: Finite = 1.0
    """Of the term in the sum."""
    weight: tuple[ClassWeight, ...] | None = None
    """Class weights, one for each class, for losses that take them."""
    inputs: Annotated[tuple[str, ...], Field(min_length=1)] = ("logits", "label")
    """What the loss is called with: fields of the batch and outputs of the network."""
    output: str = "loss"
    """Name of the term's scalar; among several terms each needs its own, and ``loss`` is their sum."""

    @field_validator("weight", mode="before")
    @classmethod
    def _is_no_factor(cls, value: Any) -> Any:
        """Refuse a single number, which means the term's share of the sum."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"needed: a list of class weights; for the term's share of the sum write factor: {value}")
        return value

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as the registry of losses takes them, class weights among them."""
        return {**super().spec(), **({} if self.weight is None else {"weight": list(self.weight)})}


class MetricConfig(ComponentConfig):
    """A further metric of the validation, beside Dice: of the foreground, on the original grid, in mm."""

    inputs: tuple[str, ...] = ("pred", "label")
    """What the metric is called with: the prediction and fields of the case."""
    output: str
    """Name of the number in TensorBoard and in the records."""


class ScheduleConfig(ComponentConfig):
    """Learning rate over the training."""

    name: str = "polynomial"
    """``polynomial``, ``cosine``, ``constant``, or one of your own."""
    power: float | None = None
    """Exponent of ``polynomial``; null takes 0.9."""
    floor: float | None = None
    """Of ``cosine``: the fraction of the peak that is left at the end; null takes 0."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training over which the rate rises linearly to its peak."""

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as the registry of schedules takes them."""
        return self.model_dump(exclude_none=True, exclude={"warmup"})
