"""What ``plan_accuracy.py`` measures: the configurations, the training step of each, and what it takes of a GPU."""

import gc
import gzip
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from volseg.config.loading import load_config
from volseg.models import build_network
from volseg.models.networks import complete_spec
from volseg.models.residual_encoder import ENCODER_BLOCKS
from volseg.parallel import FastKernels, ModelParallel
from volseg.parallel.batches import from_slab, slab_shape
from volseg.parallel.pipeline import Pipeline
from volseg.parallel.spatial import Spatial
from volseg.workflow import Named
from volseg.workflow.components import build_loss, build_optimizer
from volseg.workflow.named import Objective
from volseg.workflow.precision import Precision
from volseg.workflow.schedules import WeightAverage
from volseg.workflow.step import TrainingStep

__all__ = [
    "NETWORKS",
    "Row",
    "build_step",
    "fill_row",
    "list_one_gpu_rows",
    "list_rows",
    "measure",
    "name_row",
    "take_place",
    "wait_for_others",
]

Row = dict[str, Any]

CLASSES = 3
CONFIGS = Path(__file__).parents[2] / "configs"


def _plan(config: str) -> dict[str, Any]:
    """Return the network of a config as it is planned for the config's own patch; it takes others as well."""
    loaded = load_config(CONFIGS / config)
    return complete_spec(loaded.network.spec(), patch_size=loaded.patch.size)


def _halve(filters: Sequence[int], **parameters: Any) -> dict[str, Any]:
    """Return a DynUNet that halves its volume at every level but the first."""
    strides = [1] + [2] * (len(filters) - 1)
    sizes = {"kernel_size": [3] * len(filters), "strides": strides, "upsample_kernel_size": strides[1:]}
    return {"name": "DynUNet", "filters": list(filters), **sizes, **parameters}


NETWORKS: dict[str, dict[str, Any]] = {
    "vnet": _plan("task04_vnet.yaml"),
    "unet": _plan("task04_unet.yaml"),
    "dynunet": _halve([32, 64, 128, 256, 320]),
    "segresnet": {"name": "SegResNet", "init_filters": 32, "blocks_down": [1, 2, 2, 4], "blocks_up": [1, 1, 1]},
    "swinunetr": {"name": "SwinUNETR", "feature_size": 48},
    "mednext": {"name": "MedNeXtS"},
    "unetr": {"name": "UNETR"},
    "unet_residual": {
        "name": "UNet",
        "channels": [32, 64, 128, 256, 320],
        "strides": [2, 2, 2, 2],
        "num_res_units": 2,
    },
    "highresnet": {"name": "HighResNet"},
    "residual_encoder": {
        "name": "ResEncUNet",
        "filters": [32, 64, 128, 256, 320, 320],
        "strides": [1, 2, 2, 2, 2, 2],
        "kernel_size": [3] * 6,
        "blocks": list(ENCODER_BLOCKS[:6]),
    },
    "tiny": _halve([4, 8, 8], deep_supervision=True, deep_supr_num=1),  # to try the script without a GPU
}

MEASURED_S = 2.0
"""For so long steps are timed, ten at most and three at least; a row may say another ``measured_s``."""


def list_rows() -> list[Row]:
    """Return the configurations, in the order in which they are worth their time."""
    return [*_first_singles(), *_pairs(), *_more_singles(), *_more_pairs()]


def _first_singles() -> Iterator[Row]:
    """Yield every network on one GPU, by every way to run it, at the sizes that people train."""
    small = {"patch": [32, 48, 32], "batch": 8, "ema": 0.999}
    yield fill_row("vnet", history=True, **small)
    yield fill_row("vnet", kernels="fast", recorded=True, history=True, **small)
    small = {"patch": [40, 56, 40], "batch": 9, "ema": 0.999}
    yield fill_row("unet", history=True, **small)
    yield fill_row("unet", kernels="fast", recorded=True, **small)
    yield fill_row("dynunet", history=True)
    yield fill_row("dynunet", kernels="fast", history=True)
    yield fill_row("vnet", history=True)
    yield fill_row("vnet", kernels="fast", recorded=True, history=True)
    yield fill_row("segresnet", precision="fp32", history=True)
    yield fill_row("segresnet", kernels="fast", checkpoint="all", history=True)
    yield fill_row("swinunetr", patch=[96] * 3, history=True)
    yield fill_row("swinunetr", patch=[96] * 3, precision="fp32")
    yield fill_row("dynunet", precision="fp32")
    yield fill_row("dynunet", kernels="fast", checkpoint="all", patch=[256] * 3, batch=1)
    yield fill_row("unet", patch=[128] * 3)
    yield fill_row("vnet", patch=[64] * 3, batch=32)
    yield fill_row("segresnet", kernels="fast")
    yield fill_row("vnet", kernels="fast", checkpoint="all", patch=[192] * 3, batch=1)


def _pairs() -> Iterator[Row]:
    """Yield every network over two GPUs."""
    for net in ("dynunet", "vnet", "segresnet", "unet"):
        yield fill_row(net, kernels="fast", spatial=2, patch=[256, 128, 128], history=net == "dynunet")
    yield fill_row("vnet", pipeline=2, split_size=4, patch=[64] * 3, batch=32, history=True)
    for net in ("dynunet", "segresnet", "unet"):
        yield fill_row(net, pipeline=2, split_size=1, batch=4, patch=[96] * 3)
    yield fill_row("swinunetr", pipeline=2, split_size=1, batch=4, patch=[64] * 3)
    yield fill_row("dynunet", kernels="fast", spatial=2, recorded=True, patch=[256, 128, 128])
    yield fill_row("vnet", pipeline=2, split_size=4, recorded=True, patch=[64] * 3, batch=32)


def _more_singles() -> Iterator[Row]:
    """Yield other sizes, precisions and layouts on one GPU."""
    yield fill_row("vnet", precision="fp32")
    yield fill_row("unet", precision="fp32", patch=[96] * 3, batch=4)
    yield fill_row("dynunet", kernels="fast", recorded=True, patch=[160] * 3, batch=1)
    yield fill_row("dynunet", recorded=True)
    yield fill_row("unet", kernels="fast", checkpoint="all", patch=[160] * 3)
    yield fill_row("dynunet", layout="channels_last")
    yield fill_row("vnet", patch=[192] * 3, batch=1)
    yield fill_row("segresnet", patch=[192] * 3, batch=1)
    yield fill_row("swinunetr", recorded=True, patch=[64] * 3)
    yield fill_row("dynunet", patch=[256] * 3, batch=1)
    yield fill_row("vnet", kernels="fast", patch=[64] * 3, batch=32)
    yield fill_row("segresnet", kernels="fast", recorded=True, patch=[96] * 3)
    yield fill_row("swinunetr", patch=[128] * 3, batch=1)
    yield fill_row("unet", kernels="fast", patch=[192, 160, 128], batch=1)


def _more_pairs() -> Iterator[Row]:
    """Yield the dearer ways to take two GPUs."""
    yield fill_row("dynunet", kernels="fast", spatial=2, checkpoint="all", patch=[320] * 3, batch=1)
    yield fill_row("vnet", kernels="fast", spatial=2, precision="fp32", patch=[192, 96, 96], batch=1)
    yield fill_row("segresnet", kernels="fast", spatial=2, checkpoint=1, patch=[256, 160, 160], batch=1)
    yield fill_row("vnet", kernels="fast", spatial=2, recorded=True, patch=[256, 128, 128])
    yield fill_row("dynunet", pipeline=2, split_size=2, precision="fp32", batch=4, patch=[96] * 3)
    yield fill_row("segresnet", pipeline=2, split_size=1, recorded=True, batch=4, patch=[96] * 3)


def fill_row(net: str, **fields: Any) -> Row:
    """Return a configuration; what is not said is two volumes of 128^3 in bfloat16 on one GPU with torch's kernels."""
    plain = {"patch": [128] * 3, "batch": 2, "precision": "bf16", "layout": "contiguous", "ema": None}
    way = {"spatial": 1, "pipeline": 1, "split_size": None, "checkpoint": None, "kernels": "torch", "recorded": False}
    return {"net": net, **plain, **way, **fields}


def name_row(row: Row) -> str:
    """Return a configuration as one word per choice."""
    words = [row["net"], "x".join(map(str, row["patch"])), f"b{row['batch']}", row["precision"], row["kernels"]]
    words += [f"{key}{row[key]}" for key in ("spatial", "pipeline") if row[key] > 1]
    words += [f"split{row['split_size']}"] * (row["split_size"] is not None)
    words += [f"checkpoint_{row['checkpoint']}"] * (row["checkpoint"] is not None)
    words += ["recorded"] * row["recorded"] + ["channels_last"] * (row["layout"] == "channels_last")
    return " ".join(words)


class Marks:
    """Where a step is: how much memory is taken when each part begins, and how long the parts take.

    Peaks are looked at and reset at every mark: ``used`` and ``reserved`` keep the highest of all.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = [device for device in devices if device.type == "cuda"]
        self.watched, self.timed = False, False
        self.found: list[dict[str, Any]] = []
        self.events: list[tuple[str, Any]] = []
        self.used, self.reserved = [0] * len(self.devices), [0] * len(self.devices)

    def __call__(self, name: str) -> None:
        """Begin a part."""
        if self.timed and self.devices:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.devices[0]))
            self.events.append((name, event))
        if self.watched:
            peaks = self.read()
            now = [[torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu)] for gpu in self.devices]
            self.found.append({"mark": name, "us": time.time_ns() // 1000, "now": now, "peak_before": peaks})

    def read(self) -> list[list[int]]:
        """Return the peaks of used and reserved memory of each device since the last look, and begin anew."""
        peaks = []
        for number, gpu in enumerate(self.devices):
            peaks.append([torch.cuda.max_memory_allocated(gpu), torch.cuda.max_memory_reserved(gpu)])
            self.used[number] = max(self.used[number], peaks[-1][0])
            self.reserved[number] = max(self.reserved[number], peaks[-1][1])
            torch.cuda.reset_peak_memory_stats(gpu)
        return peaks

    def count_parts(self) -> dict[str, float]:
        """Return the milliseconds of each part, added up over the steps that were timed."""
        parts: dict[str, float] = {}
        for (name, begin), (_, end) in zip(self.events, self.events[1:], strict=False):
            if name != "end":
                parts[name] = parts.get(name, 0.0) + begin.elapsed_time(end)
        return parts


class MarkedNetwork(Named):
    """A network that says when its forward pass begins and ends."""

    def __init__(self, model: nn.Module, marks: Callable[[str], None]) -> None:
        super().__init__(model, inputs=["image"], outputs=["logits"])
        self.marks = marks

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Run the network."""
        self.marks("forward")
        outputs = super().forward(batch)
        self.marks("loss")
        return outputs


class MarkedObjective(Objective):
    """A loss that says when it is computed."""

    def __init__(self, loss: Named, marks: Callable[[str], None]) -> None:
        super().__init__(loss)
        self.marks = marks

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the loss."""
        found = super().__call__(fields)
        self.marks("backward")
        return found


def place(row: Row, devices: Sequence[torch.device], marks: Callable[[str], None]) -> tuple[nn.Module, nn.Module]:
    """Return the network where the configuration wants it, and the plain network."""
    spec = NETWORKS[row["net"]]
    net = build_network(spec, in_channels=1, out_channels=CLASSES, patch_size=row["patch"])
    marks("place")
    model: nn.Module
    if row["pipeline"] > 1:
        options = Pipeline(split_size=row["split_size"], record=row["recorded"])
        model = ModelParallel(net.to(devices[0]), strategy=options, devices=devices)
    elif row["spatial"] > 1:
        model = ModelParallel(net, strategy=Spatial(checkpoint=row["checkpoint"]))
    elif row["checkpoint"] is not None:
        model = ModelParallel(net, strategy=Spatial(checkpoint=row["checkpoint"]), devices=devices)
    elif row["kernels"] == "fast":
        model = FastKernels(net, devices[0])
    else:
        layout = torch.channels_last_3d if row["layout"] == "channels_last" else torch.contiguous_format
        model = net.to(devices[0]).to(memory_format=layout)  # type: ignore[call-overload]
    model.train()
    marks("placed")
    return model, net


def build_step(
    row: Row, devices: Sequence[torch.device], marks: Callable[[str], None] = lambda _: None
) -> Callable[[], Mapping[str, Tensor]]:
    """Return one training step of a configuration, as ``volseg train`` makes it, on a batch that stays the same."""
    torch.manual_seed(0)
    return train_by(row, devices, marks, *place(row, devices, marks))


def train_by(
    row: Row, devices: Sequence[torch.device], marks: Callable[[str], None], model: nn.Module, net: nn.Module
) -> Callable[[], Mapping[str, Tensor]]:
    """Return one training step of a network that is in its place."""
    shape = (row["batch"], 1, *row["patch"])
    own = slab_shape(model, shape) if row["spatial"] > 1 else shape  # type: ignore[arg-type]
    image: Any = torch.rand(own, device=devices[0])
    label: Any = torch.randint(CLASSES, own, dtype=torch.uint8, device=devices[0])
    if row["spatial"] > 1:
        image, label = (from_slab(model, part, shape) for part in (image, label))  # type: ignore[arg-type]
    loss = build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss").to(devices[0])
    optimizer = build_optimizer({"name": "AdamW", "lr": 1e-4}, model, on_gpu=devices[0].type == "cuda")
    optimizer.register_step_pre_hook(lambda *_: marks("optimizer"))
    step = TrainingStep(
        MarkedNetwork(model, marks),
        MarkedObjective(loss, marks),
        optimizer,
        Precision.choose(row["precision"], devices[0]),
        clip=12.0,
        record=row["recorded"] and row["pipeline"] == 1,
        look=lambda _: None,
    )
    average = WeightAverage(net, row["ema"]) if row["ema"] else None

    def train() -> Mapping[str, Tensor]:
        marks("step")
        losses = step({"image": image, "label": label})
        if row["recorded"] and row["pipeline"] == 1 and step.recorded is None:
            raise RuntimeError("this step cannot be recorded")
        if step.recorded is not None and step.recorded.refused is not None:
            raise RuntimeError(f"nothing was recorded: {step.recorded.refused}")
        if average is not None:
            average.update()
        marks("end")
        return losses

    return train


def measure(row: Row, numbers: Sequence[int], history: Path | None) -> Row:
    """Train some steps in this process; return what they take of its GPUs, and their time.

    Parameters
    ----------
    row : dict
        As `list_rows` makes it.
    numbers : sequence of int
        Of the GPUs of this process; empty for the CPU.
    history : Path, optional
        Where the allocator's own account of the first steps is written.
    """
    if row.get("pretended_voxels") and math.prod(row["patch"]) > row["pretended_voxels"]:
        return {"out_of_memory": "as was asked for, to try the script"}
    gpus = [torch.device("cuda", number) for number in numbers]
    devices = gpus or [torch.device(name) for name in ("cpu", "cpu:1")[: row["pipeline"]]]
    if gpus:
        torch.cuda.set_device(gpus[0])
    for gpu in gpus:
        torch.cuda.mem_get_info(gpu)  # makes the context
        if row.get("limit_bytes"):
            size = torch.cuda.get_device_properties(gpu).total_memory
            torch.cuda.set_per_process_memory_fraction(row["limit_bytes"] / size, gpu)
    found: Row = {"date": datetime.now(UTC).date().isoformat(), "beside": {"context": [_beside(gpu) for gpu in gpus]}}
    marks = Marks(devices)
    marks.watched = True
    noted = _Account(devices) if history is not None and gpus else None
    try:
        begin = time.perf_counter()
        torch.manual_seed(0)
        model, net = place(row, devices, marks)
        step = train_by(row, devices, marks, model, net)
        found["beside"]["placed"] = [_beside(gpu) for gpu in gpus]
        found["placed_s"] = time.perf_counter() - begin
        warm = 14 if row["pipeline"] > 1 and row["recorded"] else 6 if row["recorded"] else 3
        found["first_steps_s"] = []
        for count in range(warm):
            begin = time.perf_counter()
            step()
            _wait(gpus)
            found["first_steps_s"].append(time.perf_counter() - begin)
            if count == 0:
                found["beside"]["first step"] = [_beside(gpu) for gpu in gpus]
        if noted is not None and history is not None:
            marks.read()
            noted.end(history if row.get("history") or misses(row, marks.reserved) else None, marks.found)
        marks.watched = False
        found |= _time_steps(step, gpus, marks, row.get("measured_s", MEASURED_S), together=row["spatial"] > 1)
    except torch.OutOfMemoryError as fault:
        found["out_of_memory"] = str(fault)[:600]
    marks.read()
    found["beside"]["end"] = [_beside(gpu) for gpu in gpus]
    found |= {"max_memory_allocated": marks.used, "max_memory_reserved": marks.reserved}
    found["memory_reserved_at_end"] = [torch.cuda.memory_reserved(gpu) for gpu in gpus]
    found["memory_stats_at_end"] = [_read_statistics(gpu) for gpu in gpus]
    found["marks"] = marks.found
    if row["pipeline"] > 1 and "out_of_memory" not in found:
        found["partition"] = tell_partition(model)
    is_plain = not row["recorded"] and row["checkpoint"] is None and row["spatial"] * row["pipeline"] == 1
    if row.get("history") and gpus and is_plain and "out_of_memory" not in found:
        found["operators"] = _watch_operators(step, gpus[0])
        torch.backends.cudnn.benchmark = True
        step()
        found["operators_with_cudnn_benchmark"] = _watch_operators(step, gpus[0])
    if row.get("profile") and gpus and "out_of_memory" not in found:
        found["kernels_us"] = _tell_kernels(step, gpus)
    return found


def _tell_kernels(step: Callable[[], Any], gpus: Sequence[torch.device]) -> list[tuple[str, int, float]]:
    """Return the kernels of a step, the longest first: name, how often it runs, microseconds of all its runs."""
    steps = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        for _ in range(steps):
            step()
        _wait(gpus)
    found: dict[str, list[float]] = {}
    for event in watched.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name[:200], []).append(event.device_time)
    told = [(name, round(len(times) / steps), round(sum(times) / steps, 1)) for name, times in found.items()]
    return sorted(told, key=lambda kernel: -kernel[2])


MISSED = 0.04
"""By so much of what is reserved a forecast is wrong enough for its cause to be looked for."""


def misses(row: Row, reserved: Sequence[int]) -> bool:
    """Say whether what was reserved is far from the forecast that a row came with."""
    forecast = row.get("forecast_reserved")
    return forecast is not None and abs(forecast / max(reserved) - 1) > MISSED


def tell_partition(model: nn.Module) -> list[Row]:
    """Return the stages of a pipeline: which modules each runs first, and what the measurement said of it."""
    assert isinstance(model, ModelParallel)
    return [
        {
            "begins": stage.modules[0],
            "modules": len(stage.modules),
            "ms": stage.ms,
            "activation_bytes": stage.activation_bytes,
            "parameter_bytes": stage.parameter_bytes,
        }
        for stage in model.partition.stages
    ]


def _time_steps(
    step: Callable[[], Any], gpus: Sequence[torch.device], marks: Marks, enough: float, *, together: bool
) -> Row:
    """Return seconds of a step: waited for each, for all together, and by parts.

    Processes that work ``together`` make the same number of steps, whatever their clocks say.
    """
    marks.read()
    gc.collect()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 6 if together else len(times) < 10 and sum(times) < enough):
        begin = time.perf_counter()
        step()
        _wait(gpus)
        times.append(time.perf_counter() - begin)
    steady = marks.read()
    begin = time.perf_counter()
    for _ in times:
        step()
    _wait(gpus)
    not_waited_for = (time.perf_counter() - begin) / len(times)
    marks.timed = True
    for _ in range(3):
        step()
    _wait(gpus)
    parts = {name: ms / 3 / 1e3 for name, ms in marks.count_parts().items()}
    seconds = statistics.median(times)
    return {"seconds": seconds, "seconds_all": times, "seconds_not_waited_for": not_waited_for, "parts": parts} | {
        "peak_of_later_steps": steady
    }


def _wait(gpus: Sequence[torch.device]) -> None:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


def _beside(gpu: torch.device) -> int:
    """Return the bytes that are taken of a GPU beside torch's allocator, by this process and whoever else is on it."""
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free - torch.cuda.memory_reserved(gpu)


def _read_statistics(gpu: torch.device) -> dict[str, int]:
    """Return what the allocator holds, by pool, and how often it had to give back its cache."""
    wanted = ("reserved_bytes", "allocated_bytes", "requested_bytes", "inactive_split_bytes", "segment")
    found = torch.cuda.memory_stats(gpu)
    keys = [f"{name}.{pool}.current" for name in wanted for pool in ("small_pool", "large_pool")]
    return {key: found[key] for key in (*keys, "num_alloc_retries", "num_ooms") if key in found}


class _Operators(TorchDispatchMode):
    """What each operator takes for itself while it runs: workspaces, copies in another layout."""

    def __init__(self, gpu: torch.device) -> None:
        super().__init__()
        self.gpu = gpu
        self.found: dict[str, Row] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        before = torch.cuda.memory_allocated(self.gpu)
        torch.cuda.reset_peak_memory_stats(self.gpu)
        result = func(*args, **(kwargs or {}))
        taken = torch.cuda.memory_allocated(self.gpu) - before
        peak = torch.cuda.max_memory_allocated(self.gpu) - before
        if peak > max(taken, 0):
            given = {"operator": str(func), "given": [_tell(value) for value in (args, kwargs or {}, result)]}
            told = self.found.setdefault(json.dumps(given), {**given, "peaks": [], "taken": taken})
            if peak not in told["peaks"]:
                told["peaks"].append(peak)
        return result


def _tell(value: Any) -> Any:
    """Return an argument as JSON; of a tensor its shape, strides and type."""
    if isinstance(value, Tensor):
        return [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch.")]
    if isinstance(value, list | tuple):
        tensors = [one for one in value if isinstance(one, Tensor)]
        return f"{len(value)} tensors" if len(tensors) > 12 else [_tell(one) for one in value]
    if isinstance(value, dict):
        return {key: _tell(one) for key, one in value.items()}
    return value if isinstance(value, int | float | bool | None) else str(value)


def _watch_operators(step: Callable[[], Any], gpu: torch.device) -> list[Row]:
    """Return what the operators of one step take for themselves."""
    with _Operators(gpu) as operators:
        step()
    _wait([gpu])
    return list(operators.found.values())


BLOCK = ("size", "requested_size", "state")
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom", "snapshot")


class _Account:
    """The allocator's own account of what it was asked for, and of what it asked the device for."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=300_000)

    def end(self, path: Path | None, marks: Sequence[Mapping[str, Any]]) -> None:
        """Stop; where there is a path write events and segments, addresses numbered as they appear."""
        snapshot = None if path is None else torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        if path is None or snapshot is None:
            return
        told: Row = {"settings": {key: str(value) for key, value in snapshot.get("allocator_settings", {}).items()}}
        told["devices"] = {}
        for device in self.devices:
            entries = snapshot["device_traces"][device.index]
            segments = [one for one in snapshot["segments"] if one["device"] == device.index]
            keys = ("address", "total_size", "allocated_size", "stream", "segment_type", "segment_pool_id")
            told["devices"][device.index] = {
                "keys": sorted(entries[0]) if entries else [],
                "events": _in_columns(entries),
                "marks": _number_marks(marks, entries),
                "segments": [
                    {key: one.get(key) for key in keys}
                    | {
                        "blocks": [
                            (block["size"], block.get("requested_size"), block["state"]) for block in one["blocks"]
                        ]
                    }
                    for one in segments
                ],
            }
        path.write_bytes(gzip.compress(json.dumps(told, separators=(",", ":")).encode()))


def _number_marks(marks: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Return how many events came before each mark."""
    return [(mark["mark"], sum(entry["time_us"] <= mark["us"] for entry in entries)) for mark in marks]


def _in_columns(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return events as a column of each kind, which compresses better than rows."""
    addresses: dict[int, int] = {}
    streams: dict[int, int] = {}
    pools: dict[str, int] = {}
    columns: dict[str, list[Any]] = {"action": [], "address": [], "size": [], "stream": [], "pool": []}
    for entry in entries:
        action = entry["action"]
        address = entry.get("addr", entry.get("device_free", 0))
        columns["action"].append(ACTIONS.index(action) if action in ACTIONS else action)
        columns["address"].append(addresses.setdefault(address, len(addresses)))
        columns["size"].append(entry["size"])
        columns["stream"].append(streams.setdefault(entry["stream"], len(streams)))
        pool = str(next((value for key, value in entry.items() if "pool" in key), ""))
        columns["pool"].append(pools.setdefault(pool, len(pools)))
    lowest = min(addresses, default=0)
    return {**columns, "addresses": [address - lowest for address in addresses], "pools": list(pools)} | {
        "actions": ACTIONS,
        "streams": list(streams),
    }


def take_place(number: int, processes: int, port: int) -> None:
    """Give this process the place that a launcher would, where volumes are shared by several."""
    if processes > 1:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(processes)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def wait_for_others() -> None:
    """Wait until every process that shares the volumes is here."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


_FAST = {"kernels": "fast", "recorded": True}
_ALL = {**_FAST, "checkpoint": "all"}
_TILED = {**_FAST, "checkpoint": "tiled"}
_EAGER_ALL = {"kernels": "fast", "checkpoint": "all"}  # dropout in what is recomputed cannot be recorded


def list_one_gpu_rows() -> list[Row]:
    """Return sizes in the ways that ``auto`` chooses between on one GPU, the most useful rows first."""
    return [*_recorded(), *_other_ways(), *_other_sizes()]


def _recorded() -> Iterator[Row]:
    """Yield every network as ``volseg train`` runs it if memory suffices, with the time of each kernel."""
    profiled = {**_FAST, "profile": True}
    for net in ("dynunet", "vnet", "segresnet", "unet"):
        yield fill_row(net, **profiled)
    for net in ("unet_residual", "residual_encoder", "unetr", "highresnet", "mednext"):
        yield fill_row(net, batch=1, history=net == "unetr", **profiled)
    yield fill_row("swinunetr", patch=[96] * 3, **profiled)


def _other_ways() -> Iterator[Row]:
    """Yield the other ways to run those sizes: recomputed, started one by one, by torch's kernels."""
    for net in ("dynunet", "segresnet"):
        yield fill_row(net, **_ALL)
        yield fill_row(net, **_TILED)
        yield fill_row(net)
        yield fill_row(net, kernels="fast")
    yield fill_row("vnet", **_EAGER_ALL)
    yield fill_row("vnet")
    yield fill_row("unet", **_ALL)
    yield fill_row("unet")
    yield fill_row("swinunetr", patch=[96] * 3)
    yield fill_row("swinunetr", patch=[96] * 3, kernels="fast")
    yield fill_row("mednext", batch=1, **_ALL)
    yield fill_row("residual_encoder", batch=1, **_ALL)
    yield fill_row("unetr", batch=1)
    yield fill_row("unet_residual", batch=1)


def _other_sizes() -> Iterator[Row]:
    """Yield small patches, large ones and float32."""
    small = {"patch": [40, 56, 40], "batch": 9, "ema": 0.999}
    yield fill_row("unet", **_FAST, **small)
    yield fill_row("unet", **small)
    yield fill_row("vnet", **_FAST, patch=[32, 48, 32], batch=8, ema=0.999)
    for way in (_FAST, _ALL, _TILED):
        yield fill_row("dynunet", **way, patch=[256] * 3, batch=1)
    for net in ("dynunet", "segresnet"):
        yield fill_row(net, **_FAST, precision="fp32")
    yield fill_row("swinunetr", **_FAST, patch=[96] * 3, precision="fp32")
    yield fill_row("swinunetr", **_FAST, patch=[128] * 3, batch=1)
    yield fill_row("vnet", **_FAST, patch=[192] * 3, batch=1)
    yield fill_row("vnet", **_EAGER_ALL, patch=[192] * 3, batch=1)
    yield fill_row("segresnet", **_FAST, patch=[192] * 3, batch=1)
    yield fill_row("segresnet", **_TILED, patch=[192] * 3, batch=1)
    yield fill_row("unet", **_FAST, patch=[96] * 3, batch=4, precision="fp32")
    yield fill_row("vnet", **_FAST, patch=[64] * 3, batch=32)
