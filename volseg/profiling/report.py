"""A profile as it is handed on: JSON with a schema, ``ProfileReport.model_json_schema()``. No torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DeviceTimes", "KindRow", "LayerRow", "Peaks", "ProfileReport"]

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Peaks(_Row):
    """What the device can do at best."""

    bytes_per_second: float
    """Of its memory."""
    flops_per_second: float
    """Of its matrix units, in the precision of the step."""
    source: str
    """Of these figures."""


class DeviceTimes(_Row):
    """What one device of this process does in a step, in seconds: ``computing``, ``exposed`` and ``waiting`` add up."""

    device: int
    computing: Seconds
    """At least one kernel computes."""
    communicating: Seconds
    """Kernels and copies that carry data to and from other devices, each by itself."""
    hidden: Seconds
    """Of that, behind kernels that compute, or behind each other."""
    exposed: Seconds
    """Nothing computes, and data travel."""
    waiting: Seconds
    """Neither: the device waits for Python, or for another device."""
    step: Seconds
    """From one step's begin to the next one's."""


class LayerRow(_Row):
    """One layer in one direction, per step."""

    layer: str
    """Dotted name of the module in the plain network; in brackets what is no layer."""
    module: str
    """Class of the module; empty of what is none."""
    direction: Literal["forward", "backward", "recompute", "optimizer", "augmentation", "communication", "other"]
    device: int = 0
    calls: Annotated[float, Field(ge=0)]
    """Kernels."""
    seconds: Seconds
    """Of its kernels, each by itself."""
    share: Share
    """Of the step."""
    flops: Annotated[float, Field(ge=0)] | None
    """Of matrix units, two for each multiply-add; null where the work is not known."""
    bytes_moved: Annotated[float, Field(ge=0)] | None
    """Each tensor read or written once."""
    byte_bound: Seconds | None
    """What the memory needs for them at best; null for a device of unknown speed, as the next five."""
    flop_bound: Seconds | None
    """What the matrix units need at best."""
    bound: Seconds | None
    """The longer of the two, kernel by kernel."""
    times_bound: Annotated[float, Field(ge=0)] | None
    """``seconds`` over ``bound``."""
    bandwidth_share: Share | None
    """Bytes per second over those of the memory. Above 1 where a cache served them."""
    flop_share: Share | None
    """The same of the matrix units."""
    forecast: Seconds | None
    """By the table of measured kernels."""


class KindRow(_Row):
    """Kernels of one kind, per step; the values are those of ``LayerRow``."""

    kind: str
    calls: Annotated[float, Field(ge=0)]
    seconds: Seconds
    share: Share
    flops: float | None
    bytes_moved: float | None
    bound: Seconds | None
    times_bound: float | None
    bandwidth_share: Share | None
    flop_share: Share | None


class ProfileReport(_Row):
    """What ``volseg profile --json`` prints."""

    version: Literal[1] = 1
    """Of this form."""
    name: str
    """Of the experiment."""
    network: str
    shape: tuple[int, ...]
    """Of a step's images in this process, (B, C, D, H, W)."""
    precision: str
    source: Literal["measured", "forecast"]
    """Whether the step ran here, or was followed for a GPU that is not here."""
    device: str
    """Name of the GPU, or ``cpu``."""
    parallel: str
    """Who computes what."""
    recorded: bool
    """Whether the step is replayed from a recording."""
    not_recorded: str | None = None
    """Why it is not."""
    peaks: Peaks | None
    steps: int
    """That were watched; of a forecast one."""
    step_seconds: Seconds
    """Of one step; of a run without anybody watching."""
    batch_seconds: Seconds | None = None
    """Of it, how long the training waited for its batch; null of a forecast."""
    kernels_per_step: Annotated[float, Field(ge=0)]
    matched: Share | None = None
    """Of a recorded step: the part of its kernels' time whose layer is known from the same kernel of an eager step."""
    devices: tuple[DeviceTimes, ...]
    kinds: tuple[KindRow, ...]
    """The longest first."""
    layers: tuple[LayerRow, ...]
    """The longest first."""
    limit: str
    """What limits the step, in a sentence."""
    advice: tuple[str, ...] = ()
    """What would help, where that is known."""
    notes: tuple[str, ...] = ()
