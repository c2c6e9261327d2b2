"""Define the JSON of a profile; its schema is ``ProfileReport.model_json_schema()``. Imports no torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DevicePeaks(_Told):
    """Peak rates of the device."""

    bytes_per_second: float
    """Bandwidth of its memory."""
    flops_per_second: float
    """Rate of its matrix units, in the precision of the step."""
    source: str
    """Source of these figures."""


class DeviceTimes(_Told):
    """Seconds of one device in a step: ``computing``, ``exposed`` and ``waiting`` add up to ``step``."""

    device: int
    """Number of the device."""
    computing: Seconds
    """Time in which at least one kernel computes."""
    communicating: Seconds
    """Sum of the times of kernels and copies that carry data to and from other devices."""
    hidden: Seconds
    """Part of ``communicating`` that overlaps with computing kernels or other communication."""
    exposed: Seconds
    """Time in which data are transferred but no kernel computes."""
    waiting: Seconds
    """Time without either: the device waits for Python, or for another device."""
    step: Seconds
    """Time from the start of one step to the start of the next."""


class _Sums(_Told):
    """Sums over some kernels, per step."""

    calls: Annotated[float, Field(ge=0)]
    """Number of kernels, or of operators on a CPU."""
    seconds: Seconds
    """Sum of the times of these kernels."""
    share: Share
    """Share of the step: ``seconds`` divided by the seconds of the step."""
    flops: Annotated[float, Field(ge=0)] | None
    """Operations of matrix units, two per multiply-add; null if the work is unknown."""
    bytes_moved: Annotated[float, Field(ge=0)] | None
    """Bytes read and written, each tensor once; null if the work is unknown."""
    bound: Seconds | None
    """Minimum time that the device needs, by bytes or by flops, whichever is longer, kernel by kernel; null, like the
    next three values, for a device of unknown speed."""
    times_bound: Annotated[float, Field(ge=0)] | None
    """``seconds`` divided by ``bound``."""
    bandwidth_share: Share | None
    """Share of the memory's bandwidth; above 1 if a cache served the bytes."""
    flop_share: Share | None
    """Share of the matrix units' rate."""


class LayerRow(_Sums):
    """One layer in one direction, per step."""

    layer: str
    """Dotted name of the module in the plain network, or a name in brackets for work outside layers."""
    module: str
    """Class of the module; empty for work outside layers."""
    direction: Literal["forward", "backward", "recompute", "optimizer", "augmentation", "communication", "other"]
    """Direction of the layer's computation, or another kind of work for it."""
    device: int = 0
    """Number of the device."""


class KindRow(_Sums):
    """Kernels of one kind, per step."""

    kind: str
    """``convolution``, ``norm``, ``pointwise`` and so on; ``communication`` carries data to other devices."""


class ProfileReport(_Told):
    """The output of ``volseg profile --json``."""

    version: Literal[1] = 1
    """Version of this format."""
    name: str
    """Name of the experiment."""
    network: str
    """Name of the network in the config."""
    shape: tuple[int, ...]
    """Shape of a step's images in this process, (B, C, D, H, W)."""
    precision: str
    """Precision of the forward pass and the loss."""
    source: Literal["measured", "forecast"]
    """Whether the step ran here, or was estimated for another GPU."""
    device: str
    """Name of the GPU, or ``cpu``."""
    parallel: str
    """Division of the work between devices."""
    recorded: bool
    """Whether the step is replayed from a recording."""
    not_recorded: str | None = None
    """Why the step is not replayed."""
    peaks: DevicePeaks | None
    """Peak rates of the device; null for a CPU, and for a GPU of an unknown kind."""
    steps: int
    """Number of profiled steps; 1 for a forecast."""
    step_seconds: Seconds
    """Time of one step, measured without a profiler."""
    batch_seconds: Seconds | None = None
    """Part of the step in which the training waited for its batch; null for a forecast."""
    kernels_per_step: Annotated[float, Field(ge=0)]
    """Number of kernels in a step, or of operators on a CPU."""
    matched: Share | None = None
    """For a recorded step: share of its kernels' time whose layer is known from the same kernel of an eager step."""
    devices: tuple[DeviceTimes, ...]
    """Times of the devices of this process."""
    kinds: tuple[KindRow, ...]
    """Rows, the longest first."""
    layers: tuple[LayerRow, ...]
    """Rows, the longest first."""
    limit: str
    """The limit of the step, in a sentence."""
    advice: tuple[str, ...] = ()
    """Remedies, if known."""
    notes: tuple[str, ...] = ()
    """Further remarks for the reader."""
