"""Describe a profile in words: the cells of its tables, the step's limit, and advice."""

from collections.abc import Sequence

from volseg.profiling.report import DeviceTimes, KindRow, LayerRow, ProfileReport

KIND_HEADER = ("kernels", "calls", "time", "share", "memory", "tensor", "bound", "x bound")
"""``memory`` and ``tensor``: the achieved share of the memory's bandwidth, and of the tensor cores."""

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


def list_kind_cells(row: KindRow | LayerRow) -> list[str]:
    """Return the cells of a row after its name."""
    memory, tensor, multiple = (
        "" if share is None else f"{share:.2f}" for share in (row.bandwidth_share, row.flop_share, row.times_bound)
    )
    seconds, bound = format_seconds(row.seconds), format_seconds(row.bound)
    return [f"{row.calls:.0f}", seconds, f"{row.share:.1%}", memory, tensor, bound, multiple]


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


MOSTLY = 0.5
"""Share of the step above which many small kernels, or passes over memory, limit it."""

MUCH = 0.15
"""Share of the step below which a cause is not named."""

SMALL = 1e-6
"""Bound in seconds below which a kernel's time is only the GPU's overhead for starting and ending it."""


def describe_limit(report: ProfileReport) -> str:
    """Return the limits of a step in words, about the busiest device."""
    device = get_busiest_device(report.devices)
    is_gpu = report.device != "cpu"
    name, batch = "the GPU" if is_gpu else "the CPU", _find_batch_share(report)
    limits = {
        "the training waits {} of the step for its batch": batch,
        name + " waits {} of the step for Python": device.waiting / device.step - (batch if is_gpu else 0.0),
        "{} of the step is communication that no computation overlaps": device.exposed / device.step,
    }
    told = [words.format(f"{share:.0%}") for words, share in limits.items() if share >= MUCH]
    told.append(f"{name} computes {device.computing / device.step:.0%} of the step")
    computing = [kind for kind in report.kinds if kind.kind != "communication"]
    told.append(f"its longest kernels: {', '.join(map(_describe_kind, computing[:2])) or 'none'}")
    return "; ".join(told)


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


def _describe_kind(row: KindRow) -> str:
    """Return the name of a kind with its share of the step, and of the device's nearer peak rate."""
    told = f"{row.kind} ({row.share:.0%})"
    if row.flop_share is None or row.bandwidth_share is None:
        return told
    if row.flop_share >= row.bandwidth_share:
        return f"{told} at {row.flop_share:.2f} of the tensor cores"
    return f"{told} at {row.bandwidth_share:.2f} of the memory's bandwidth"


def advise(report: ProfileReport) -> list[str]:
    """Return advice for a faster step from its profile."""
    is_gpu, busiest = report.device != "cpu", get_busiest_device(report.devices)

    def sum_kinds(*names: str) -> float:
        return sum(kind.share for kind in report.kinds if kind.kind in names)

    causes = [
        (
            _find_batch_share(report),
            MUCH,
            "is spent waiting for the batch: leave out the slowest augmentation (augmentation.elastic, blur, "
            "low_resolution), or store cases on the GPU (data.keep: device)",
        ),
        (
            busiest.waiting / busiest.step - _find_batch_share(report) if is_gpu and not report.recorded else 0.0,
            MUCH,
            f"is spent waiting for Python, which starts {report.kernels_per_step:.0f} kernels one by one, as the step "
            f"is not recorded ({report.not_recorded}); a larger patch or batch gives each kernel more work",
        ),
        (
            max(each.exposed / each.step for each in report.devices),
            MUCH,
            "is communication that no computation overlaps: larger pieces per GPU overlap more; volseg plan compares "
            "data, spatial and pipeline",
        ),
        (
            sum(kind.share for kind in report.kinds if kind.bound is not None and kind.bound < SMALL * kind.calls),
            MOSTLY,
            "is spent in kernels too small for this GPU: a larger patch.size or patch.batch hardly slows them down",
        ),
        (
            sum_kinds("convolution", "product") if is_gpu and report.precision == "float32" else 0.0,
            MUCH,
            "is spent multiplying in float32: with training.precision: bf16, the tensor cores are at least twice as "
            "fast, and half the bytes are moved",
        ),
        (
            sum_kinds("norm", "pointwise", "copy", "reduction") if is_gpu and report.precision == "bfloat16" else 0.0,
            MOSTLY,
            "is spent in passes over memory (norms, activations, sums, copies): with training.kernels: fast, a network "
            "on one GPU computes a norm and its activation in one pass",
        ),
    ]
    return [f"{share:.0%} of the step {words}" for share, least, words in causes if share >= least]
