"""What ``plan_accuracy.py`` measures: the configurations, the training step of each, and what it takes of a GPU."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from workers import Row

from volseg.config.loading import load_config
from volseg.models.networks import build_network, complete_spec
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
    "unet_residual": {"name": "UNet", "channels": [32, 64, 128, 256, 320], "strides": [2, 2, 2, 2], "num_res_units": 2},
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
    """Return the configurations of one GPU and of two, in the order in which they are worth their time."""
    return [*list_one_gpu_rows(), *_pairs(), *_more_pairs()]


def _pairs() -> Iterator[Row]:
    """Yield every network over two GPUs."""
    for net in ("dynunet", "vnet", "segresnet", "unet"):
        yield fill_row(net, kernels="fast", spatial=2, patch=[256, 128, 128])
    yield fill_row("vnet", pipeline=2, split_size=4, patch=[64] * 3, batch=32)
    for net in ("dynunet", "segresnet", "unet"):
        yield fill_row(net, pipeline=2, split_size=1, batch=4, patch=[96] * 3)
    yield fill_row("swinunetr", pipeline=2, split_size=1, batch=4, patch=[64] * 3)
    yield fill_row("dynunet", kernels="fast", spatial=2, recorded=True, patch=[256, 128, 128])
    yield fill_row("vnet", pipeline=2, split_size=4, recorded=True, patch=[64] * 3, batch=32)


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


def place(row: Row, devices: Sequence[torch.device]) -> tuple[nn.Module, nn.Module]:
    """Return the network where the configuration wants it, and the plain network."""
    spec = NETWORKS[row["net"]]
    net = build_network(spec, in_channels=1, out_channels=CLASSES, patch_size=row["patch"])
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
    return model.train(), net


def build_step(
    row: Row, model: nn.Module, net: nn.Module, optimizer: Optimizer, precision: Precision, *, record: bool
) -> tuple[TrainingStep, Callable[[], object]]:
    """Return the training step of a configuration as ``volseg train`` makes it, and what averages the weights."""
    device = next(model.parameters()).device
    loss = build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss").to(device)
    named = Named(model, inputs=["image"], outputs=["logits"])
    step = TrainingStep(named, Objective(loss), optimizer, precision, clip=12.0, record=record, look=lambda _: None)
    return step, WeightAverage(net, row["ema"]).update if row["ema"] else lambda: None


def make_optimizer(model: nn.Module, *, on_gpu: bool) -> Optimizer:
    """Return the optimizer of every configuration."""
    return build_optimizer({"name": "AdamW", "lr": 1e-4}, model, on_gpu=on_gpu)


def train_by(row: Row, devices: Sequence[torch.device], model: nn.Module, net: nn.Module) -> Callable[[], object]:
    """Return one training step of a network that is in its place, on a batch that stays the same."""
    shape = (row["batch"], 1, *row["patch"])
    own = slab_shape(model, shape) if row["spatial"] > 1 else shape  # type: ignore[arg-type]
    image: Any = torch.rand(own, device=devices[0])
    label: Any = torch.randint(CLASSES, own, dtype=torch.uint8, device=devices[0])
    if row["spatial"] > 1:
        image, label = (from_slab(model, part, shape) for part in (image, label))  # type: ignore[arg-type]
    optimizer = make_optimizer(model, on_gpu=devices[0].type == "cuda")
    record = row["recorded"] and row["pipeline"] == 1
    precision = Precision.choose(row["precision"], devices[0])
    step, average = build_step(row, model, net, optimizer, precision, record=record)

    def train() -> None:
        step({"image": image, "label": label})
        if record and step.recorded is None:
            raise RuntimeError("this step cannot be recorded")
        if step.recorded is not None and step.recorded.refused is not None:
            raise RuntimeError(f"nothing was recorded: {step.recorded.refused}")
        average()

    return train


def measure(row: Row, numbers: Sequence[int]) -> Row:
    """Train some steps in this process; return what they take of its GPUs, and their time.

    Parameters
    ----------
    row : dict
        As `list_rows` makes it.
    numbers : sequence of int
        Of the GPUs of this process; empty for the CPU.
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
    try:
        begin = time.perf_counter()
        torch.manual_seed(0)
        model, net = place(row, devices)
        step = train_by(row, devices, model, net)
        found["beside"]["placed"] = [_beside(gpu) for gpu in gpus]
        found["placed_s"] = time.perf_counter() - begin
        warm = 14 if row["pipeline"] > 1 and row["recorded"] else 6 if row["recorded"] else 3
        found["first_steps_s"] = [_time_one(step, gpus) for _ in range(warm)]
        found |= _time_steps(step, gpus, row.get("measured_s", MEASURED_S), together=row["spatial"] > 1)
    except torch.OutOfMemoryError as fault:
        found["out_of_memory"] = str(fault)[:600]
    found["beside"]["end"] = [_beside(gpu) for gpu in gpus]
    for kind in ("allocated", "reserved"):
        found[f"max_memory_{kind}"] = [getattr(torch.cuda, f"max_memory_{kind}")(gpu) for gpu in gpus]
    if row["pipeline"] > 1 and "out_of_memory" not in found:
        found["partition"] = tell_partition(model)
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


def _time_steps(step: Callable[[], Any], gpus: Sequence[torch.device], enough: float, *, together: bool) -> Row:
    """Return seconds of a step: waited for each, and for all together.

    Processes that work ``together`` make the same number of steps, whatever their clocks say.
    """
    gc.collect()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 6 if together else len(times) < 10 and sum(times) < enough):
        times.append(_time_one(step, gpus))
    begin = time.perf_counter()
    for _ in times:
        step()
    _wait(gpus)
    not_waited_for = (time.perf_counter() - begin) / len(times)
    return {"seconds": statistics.median(times), "seconds_all": times, "seconds_not_waited_for": not_waited_for}


def _time_one(step: Callable[[], Any], gpus: Sequence[torch.device]) -> float:
    """Return the seconds of a step that is waited for."""
    begin = time.perf_counter()
    step()
    _wait(gpus)
    return time.perf_counter() - begin


def _wait(gpus: Sequence[torch.device]) -> None:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


def _beside(gpu: torch.device) -> int:
    """Return the bytes that are taken of a GPU beside torch's allocator, by this process and whoever else is on it."""
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free - torch.cuda.memory_reserved(gpu)


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
        yield fill_row(net, batch=1, **profiled)
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
