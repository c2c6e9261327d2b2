"""What limits a step, in a sentence, and what is known to help: pure, on the numbers of a profile."""

from collections.abc import Sequence

from volseg.profiling.report import DevicePeaks, DeviceTimes, KindRow, LayerRow, ProfileReport

__all__ = ["FAR", "advise", "describe_limit", "find_busiest", "find_far", "name_bound"]

FAR = 1.5
"""Times its bound: a layer above is named."""

MOSTLY = 0.5
"""Of the step: what takes as much limits it, whatever else there is."""

MUCH = 0.15
"""Of the step: what takes less is not worth a change."""

SMALL = 1e-6
"""Seconds: a kernel whose bound is below takes as long as a GPU needs to begin one and to end it."""

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
    """Return what limits a step; of several devices the busiest is spoken of."""
    device = find_busiest(report.devices)
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


def find_busiest(devices: Sequence[DeviceTimes]) -> DeviceTimes:
    """Return the device that computes longest."""
    return max(devices, key=lambda each: each.computing)


def _find_batch_share(report: ProfileReport) -> float:
    """Return the part of a step for which the training waits for its batch.

    Of a GPU, that which itself waits: its host may wait for a batch while the GPU has steps to do.
    """
    share = (report.batch_seconds or 0.0) / report.step_seconds
    device = find_busiest(report.devices)
    return share if report.device == "cpu" else min(share, device.waiting / device.step)


def _describe_kinds(kinds: Sequence[KindRow], peaks: DevicePeaks | None) -> str:
    """Return the two kinds that take longest, and how near to the device's best they are."""
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
    """Return which share of a row is the larger: of the tensor cores, or of the memory's bandwidth."""
    return "tensor cores" if (row.flop_share or 0.0) >= (row.bandwidth_share or 0.0) else "bandwidth"


def _tell_nearness(row: KindRow, peaks: DevicePeaks | None) -> str:
    if _is_small(row):
        return f" of {row.calls:.0f} kernels with too little work for any rate"
    if peaks is None or row.flop_share is None or row.bandwidth_share is None:
        return ""
    share = max(row.flop_share, row.bandwidth_share)
    where = "the tensor cores" if name_bound(row) == "tensor cores" else "the memory's bandwidth"
    return f" at {share:.2f} of {where}"


def find_far(layers: Sequence[LayerRow], *, times: float = FAR) -> list[LayerRow]:
    """Return the layers that take more than ``times`` their bound, those first of which most is to be had."""
    far = [row for row in layers if row.times_bound is not None and row.times_bound > times]
    return sorted(far, key=lambda row: -(row.seconds - (row.bound or 0.0)))


def advise(report: ProfileReport) -> list[str]:
    """Return what would help a step, as far as its profile tells, what helps most first."""
    return [advice for advice in (rule(report) for rule in RULES) if advice is not None]


def _advise_batches(report: ProfileReport) -> str | None:
    share = _find_batch_share(report)
    if share < MUCH:
        return None
    return (
        f"{share:.0%} of the step wait for the batch: leave out what augmentation takes longest (augmentation.elastic, "
        "blur, low_resolution), or keep cases on the GPU (data.keep: device)"
    )


def _advise_recording(report: ProfileReport) -> str | None:
    device = find_busiest(report.devices)
    if report.device == "cpu" or report.recorded or device.waiting < MUCH * device.step:
        return None
    return (
        f"Python starts {report.kernels_per_step:.0f} kernels one by one, and those of a recorded step all at once: it "
        f"is not recorded ({report.not_recorded or 'nobody knows why'}); a larger patch or batch gives each kernel more"
    )


def _advise_precision(report: ProfileReport) -> str | None:
    multiplies = sum(kind.share for kind in report.kinds if kind.kind in ("convolution", "product"))
    if report.device == "cpu" or report.precision != "float32" or multiplies < MUCH:
        return None
    return (
        f"{multiplies:.0%} of the step multiply in float32: training.precision: bf16 lets the tensor cores multiply "
        "twice as much or more, and moves half the bytes"
    )


def _advise_bytes(report: ProfileReport) -> str | None:
    passes = [kind for kind in report.kinds if kind.kind in ("norm", "pointwise", "copy", "reduction")]
    share = sum(kind.share for kind in passes)
    if report.device == "cpu" or share < MOSTLY or report.precision != "bfloat16":
        return None
    return (
        f"{share:.0%} of the step are passes over memory (norms, activations, sums, copies): training.kernels: fast "
        "writes a norm and its activation in one pass, where the network is on one GPU"
    )


def _advise_communication(report: ProfileReport) -> str | None:
    device = max(report.devices, key=lambda each: each.exposed)
    if device.exposed < MUCH * device.step:
        return None
    return (
        f"{device.exposed / device.step:.0%} of the step are communication that nothing hides: larger pieces for each "
        "GPU hide more of it; volseg plan compares data, spatial and pipeline"
    )


def _advise_size(report: ProfileReport) -> str | None:
    small = sum(kind.share for kind in report.kinds if _is_small(kind))
    if small < MOSTLY:
        return None
    return (
        f"{small:.0%} of the step are kernels that are too small for this GPU: a larger patch.size or patch.batch "
        "costs them next to nothing"
    )


RULES = (_advise_batches, _advise_recording, _advise_communication, _advise_size, _advise_precision, _advise_bytes)
