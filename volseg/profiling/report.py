"""A profile as it is handed on: JSON with a schema, ``ProfileReport.model_json_schema()``. No torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DevicePeaks", "DeviceTimes", "KindRow", "LayerRow", "ProfileReport"]

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DevicePeaks(_Told):
    """What the device can do at best."""

    bytes_per_second: float
    """Of its memory."""
    flops_per_second: float
    """Of its matrix units, in the precision of the step."""
    source: str
    """Of these figures."""


class DeviceTimes(_Told):
    """What one device of this process does in a step, in seconds: ``computing``, ``exposed`` and ``waiting`` add up."""

    device: int
    """Its number."""
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


class _Sums(_Told):
    """Of some kernels, per step."""

    calls: Annotated[float, Field(ge=0)]
    """Kernels; on a CPU operators."""
    seconds: Seconds
    """Of these kernels, each by itself."""
    share: Share
    """Of the step: ``seconds`` over those of the step."""
    flops: Annotated[float, Field(ge=0)] | None
    """Of matrix units, two for each multiply-add; null where the work is not known."""
    bytes_moved: Annotated[float, Field(ge=0)] | None
    """Each tensor read or written once."""
    bound: Seconds | None
    """What the device needs at best, by bytes or by flops, whichever is longer, kernel by kernel; null for a device of
    unknown speed, as are the next three."""
    times_bound: Annotated[float, Field(ge=0)] | None
    """``seconds`` over ``bound``."""
    bandwidth_share: Share | None
    """Bytes per second over those of the memory. Above 1 where a cache served them."""
    flop_share: Share | None
    """Flops per second over those of the matrix units."""


class LayerRow(_Sums):
    """One layer in one direction, per step."""

    layer: str
    """Dotted name of the module in the plain network; in brackets what is no layer."""
    module: str
    """Class of the module; empty of what is none."""
    direction: Literal["forward", "backward", "recompute", "optimizer", "augmentation", "communication", "other"]
    """In which the layer is computed, or what else is done for it."""
    device: int = 0
    """Number of the device."""
    byte_bound: Seconds | None
    """What the memory needs at best; null for a device of unknown speed."""
    flop_bound: Seconds | None
    """What the matrix units need at best; null for a device of unknown speed."""
    forecast: Seconds | None
    """By the table of measured kernels; null where no work is known."""


class KindRow(_Sums):
    """Kernels of one kind, per step."""

    kind: str
    """``convolution``, ``norm``, ``pointwise`` and so on; ``communication`` is what carries data to other devices."""


class ProfileReport(_Told):
    """What ``volseg profile --json`` prints."""

    version: Literal[1] = 1
    """Of this form."""
    name: str
    """Of the experiment."""
    network: str
    """Of the network, as the config names it."""
    shape: tuple[int, ...]
    """Of a step's images in this process, (B, C, D, H, W)."""
    precision: str
    """In which forward and loss are computed."""
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
    peaks: DevicePeaks | None
    """Of the device; null of a CPU, and of a GPU of an unknown kind."""
    steps: int
    """That were watched; of a forecast one."""
    step_seconds: Seconds
    """Of one step; of a run without anybody watching."""
    batch_seconds: Seconds | None = None
    """Of it, how long the training waited for its batch; null of a forecast."""
    kernels_per_step: Annotated[float, Field(ge=0)]
    """On a CPU operators."""
    matched: Share | None = None
    """Of a recorded step: the part of its kernels' time whose layer is known from the same kernel of an eager step."""
    devices: tuple[DeviceTimes, ...]
    """Of this process."""
    kinds: tuple[KindRow, ...]
    """The longest first."""
    layers: tuple[LayerRow, ...]
    """The longest first."""
    limit: str
    """What limits the step, in a sentence."""
    advice: tuple[str, ...] = ()
    """What would help, where that is known."""
    notes: tuple[str, ...] = ()
    """What the reader must know besides."""
