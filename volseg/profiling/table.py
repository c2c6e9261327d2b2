"""Put a profile into words: the cells of its tables, the step's limit, and advice."""

from collections.abc import Sequence

from volseg.profiling.report import DevicePeaks, DeviceTimes, KindRow, LayerRow, ProfileReport

KIND_HEADER = ("kernels", "calls", "time", "share", "memory", "tensor", "bound", "x bound")
"""``memory`` and ``tensor``: the achieved share of the memory's bandwidth, and of the tensor cores; for a device of
unknown speed, bytes and floating-point operations per second."""

LAYER_HEADER = ("layer", "module", "direction", *KIND_HEADER[1:])


def format_seconds(seconds: float | None) -> str:
    """Return a time with three digits.

    >>> [format_seconds(seconds) for seconds in (1.5, 0.0123, 4.56e-6, 0, None)]
    ['1.5 s', '12.3 ms', '4.56 us', '0', '']
    """
    if seconds is None:
        return ""
    if seconds < 1e-11:  # rounding error of a difference
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} us"


def _tell_share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _tell_rate(amount: float | None, seconds: float, unit: str) -> str:
    """Return a rate per second, for a device of unknown speed."""
    return f"{amount / seconds / 1e9:.3g} G{unit}/s" if amount and seconds else ""


def list_kind_cells(row: KindRow | LayerRow) -> list[str]:
    """Return the cells of a row after its name."""
    return [
        f"{row.calls:.0f}",
        format_seconds(row.seconds),
        f"{row.share:.1%}",
        _tell_share(row.bandwidth_share) or _tell_rate(row.bytes_moved, row.seconds, "B"),
        _tell_share(row.flop_share) or _tell_rate(row.flops, row.seconds, "FLOP"),
        format_seconds(row.bound),
        _tell_share(row.times_bound),
    ]


def list_layer_cells(row: LayerRow) -> list[str]:
    """Return the cells of a layer."""
    layer = row.layer if row.device == 0 else f"{row.layer} on {row.device}"
    return [layer, row.module, row.direction, *list_kind_cells(row)]


def list_device_cells(device: DeviceTimes) -> dict[str, str]:
    """Return the times of a device in a step, by name."""
    cells = {"computing": device.computing, "waiting for Python": device.waiting}
    if device.communicating:
        cells |= {"communication, hidden": device.hidden, "communication, exposed": device.exposed}
    return {name: f"{format_seconds(seconds)} ({seconds / device.step:.0%})" for name, seconds in cells.items()}


FAR = 1.5
"""Multiple of its bound above which a layer is listed."""

MOSTLY = 0.5
"""Share of the step from which a cause counts as its limit."""

MUCH = 0.15
"""Share of the step below which a change is not worthwhile."""

SMALL = 1e-6
"""Bound in seconds below which a kernel's time is only the GPU's overhead for starting and ending it."""

PLURALS = {
    "convolution": "convolutions",
    "product": "matrix products",
    "norm": "norms",
    "pointwise": "pointwise passes",
    "copy": "copies",
    "reduction": "reductions",
    "resampling": "resampling and pooling",
    "loss": "the loss",
    "optimizer": "the optimizer",
    "augmentation": "the augmentation",
    "communication": "communication",
}


def describe_limit(report: ProfileReport) -> str:
    """Return the limit of a step as a sentence, about the busiest device."""
    device = get_busiest_device(report.devices)
    is_gpu = report.device != "cpu"
    name = "the GPU" if is_gpu else "the CPU"
    waits, exposed, computes = (seconds / device.step for seconds in (device.waiting, device.exposed, device.computing))
    longest = _describe_kinds(report.kinds, report.peaks)
    if (share := _find_batch_share(report)) >= MOSTLY:
        return f"the training waits {share:.0%} of the step for its batch; {longest}"
    if waits >= MOSTLY:
        what = "for Python, which starts its kernels one by one" if is_gpu else "for Python between its operators"
        return f"{name} waits {waits:.0%} of the step {what}; {longest}"
    if exposed >= MUCH:
        return (
            f"{exposed:.0%} of the step are communication that no computing hides, and {name} computes {computes:.0%} "
            f"of it; {longest}"
        )
    also = f", and waits {waits:.0%} of it for Python" if waits >= MUCH else ""
    return f"{name} computes {computes:.0%} of the step{also}; {longest}"


def get_busiest_device(devices: Sequence[DeviceTimes]) -> DeviceTimes:
    """Return the device that computes longest."""
    return max(devices, key=lambda each: each.computing)


def _find_batch_share(report: ProfileReport) -> float:
    """Return the share of a step in which the training waits for its batch.

    For a GPU, at most the share in which the GPU waits: its host may wait for a batch while the GPU still computes.
    """
    share = (report.batch_seconds or 0.0) / report.step_seconds
    device = get_busiest_device(report.devices)
    return share if report.device == "cpu" else min(share, device.waiting / device.step)


def _describe_kinds(kinds: Sequence[KindRow], peaks: DevicePeaks | None) -> str:
    """Return a description of the two slowest kinds, with their share of the device's peak rates."""
    computing = [kind for kind in kinds if kind.kind != "communication"]
    if not computing:
        return "nothing was computed"
    first, *others = computing
    told = f"{first.share:.0%} of it are {PLURALS.get(first.kind, first.kind)}{_tell_nearness(first, peaks)}"
    if others:
        second = others[0]
        name = PLURALS.get(second.kind, second.kind)
        told += f", the next are {name} ({second.share:.0%}){_tell_nearness(second, peaks)}"
    return told


def _is_small(row: KindRow) -> bool:
    return row.bound is not None and row.bound < SMALL * row.calls


def name_bound(row: KindRow | LayerRow) -> str:
    """Return the name of the larger share of a row: tensor cores or bandwidth."""
    return "tensor cores" if (row.flop_share or 0.0) >= (row.bandwidth_share or 0.0) else "bandwidth"


def _tell_nearness(row: KindRow, peaks: DevicePeaks | None) -> str:
    if _is_small(row):
        return f" of {row.calls:.0f} kernels with too little work for any rate"
    if peaks is None or row.flop_share is None or row.bandwidth_share is None:
        return ""
    share = max(row.flop_share, row.bandwidth_share)
    where = "the tensor cores" if name_bound(row) == "tensor cores" else "the memory's bandwidth"
    return f" at {share:.2f} of {where}"


def list_far_from_bound(layers: Sequence[LayerRow]) -> list[LayerRow]:
    """Return the layers that take more than `FAR` times their bound, sorted by the possible gain."""
    far = [row for row in layers if row.times_bound is not None and row.times_bound > FAR]
    return sorted(far, key=lambda row: -(row.seconds - (row.bound or 0.0)))


def advise(report: ProfileReport) -> list[str]:
    """Return advice for a faster step from its profile."""
    found: list[str] = []
    busiest, is_gpu = get_busiest_device(report.devices), report.device != "cpu"
    batches = _find_batch_share(report)
    if batches >= MUCH:
        found.append(
            f"{batches:.0%} of the step wait for the batch: leave out what augmentation takes longest "
            "(augmentation.elastic, blur, low_resolution), or keep cases on the GPU (data.keep: device)"
        )
    if is_gpu and not report.recorded and busiest.waiting >= MUCH * busiest.step:
        found.append(
            f"Python starts {report.kernels_per_step:.0f} kernels one by one, and those of a recorded step all at "
            f"once: it is not recorded ({report.not_recorded or 'nobody knows why'}); a larger patch or batch gives "
            "each kernel more"
        )
    device = max(report.devices, key=lambda each: each.exposed)
    if device.exposed >= MUCH * device.step:
        found.append(
            f"{device.exposed / device.step:.0%} of the step are communication that nothing hides: larger pieces for "
            "each GPU hide more of it; volseg plan compares data, spatial and pipeline"
        )
    small = sum(kind.share for kind in report.kinds if _is_small(kind))
    if small >= MOSTLY:
        found.append(
            f"{small:.0%} of the step are kernels that are too small for this GPU: a larger patch.size or patch.batch "
            "costs them next to nothing"
        )
    multiplies = sum(kind.share for kind in report.kinds if kind.kind in ("convolution", "product"))
    if is_gpu and report.precision == "float32" and multiplies >= MUCH:
        found.append(
            f"{multiplies:.0%} of the step multiply in float32: training.precision: bf16 lets the tensor cores "
            "multiply twice as much or more, and moves half the bytes"
        )
    passes = sum(kind.share for kind in report.kinds if kind.kind in ("norm", "pointwise", "copy", "reduction"))
    if is_gpu and report.precision == "bfloat16" and passes >= MOSTLY:
        found.append(
            f"{passes:.0%} of the step are passes over memory (norms, activations, sums, copies): training.kernels: "
            "fast writes a norm and its activation in one pass, where the network is on one GPU"
        )
    return found
