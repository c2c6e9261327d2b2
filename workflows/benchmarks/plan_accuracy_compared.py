"""What is forecast of the configurations that ``plan_accuracy.py`` measured, beside what it measured: errors, plot."""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plan_accuracy_rows import CLASSES, NETWORKS, Row, list_rows
from svg import circle, line, rectangle, text, write
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.forecast.candidate import Candidate, Forecast
from volseg.forecast.gpu_kinds import find_kind
from volseg.forecast.instances import find_links
from volseg.models import build_network
from volseg.parallel.candidates.choosing import choose, judge
from volseg.parallel.candidates.forecasting import Machine, forecast_work
from volseg.parallel.candidates.work import Batch, Step, Work
from volseg.workflow import Named
from volseg.workflow.averaging import WeightAverage
from volseg.workflow.components import build_loss, build_optimizer
from volseg.workflow.objective import Objective
from volseg.workflow.precision import Precision
from volseg.workflow.step import TrainingStep

__all__ = ["compare", "describe", "draw_random", "forecast_row", "foretell", "plot", "summarise"]

COLOURS = {"vnet": "#d9a441", "unet": "#5aa05a", "dynunet": "#1b6ca8", "segresnet": "#a04f8c", "swinunetr": "#b5442e"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GIB = 2**30


def build_work(row: Row) -> Work:
    """Return the step of a configuration, as it is measured, for whoever follows it."""
    shape = (row["batch"], 1, *row["patch"])

    net = build_network(NETWORKS[row["net"]], in_channels=1, out_channels=CLASSES, patch_size=row["patch"])
    if row["layout"] == "channels_last":
        net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def make_batch(rows: int, device: torch.device) -> Batch:
        size = (rows, 1, *row["patch"])
        return {"image": torch.zeros(size, device=device), "label": torch.zeros(size, dtype=torch.uint8, device=device)}

    def make_optimizer(model: nn.Module) -> Optimizer:
        return build_optimizer({"name": "AdamW", "lr": 1e-4}, model, on_gpu=True)

    def build_step(model: nn.Module, optimizer: Optimizer) -> Step:
        device = next(model.parameters()).device
        loss = build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss").to(device)
        named = Named(model, inputs=["image"], outputs=["logits"])
        precision = Precision(device.type, DTYPES[row["precision"]])
        step = TrainingStep(named, Objective(loss), optimizer, precision, clip=12.0, record=False, look=lambda _: None)
        average = WeightAverage(model, row["ema"]) if row["ema"] else None

        def run(batch: Batch) -> Any:
            losses = step({name: field for name, field in batch.items() if isinstance(field, Tensor)})
            if average is not None:
                average.update()
            return losses

        return run

    return Work(
        build=net.train,
        shape=shape,
        make_batch=make_batch,
        build_optimizer=make_optimizer,
        build_step=build_step,
        precision=DTYPES[row["precision"]],
        name=row["net"],
    )


def forecast_row(row: Row, gpu: str = "h200", gpu_bytes: int | None = None) -> Forecast:
    """Return what is forecast of a configuration, on a GPU of its kind or of another memory."""
    kind = find_kind(gpu)
    names = ("spatial", "pipeline", "split_size", "checkpoint", "kernels", "recorded")
    # A pipeline is cut by times that are measured when it starts: what is compared is the cut that was made.
    cuts = tuple(stage["begins"] for stage in row["partition"][1:]) if "partition" in row else None
    candidate = Candidate(**{name: row[name] for name in names}, cuts=cuts)
    links, memory = find_links(kind), gpu_bytes or kind.memory
    machine = Machine(gpu=kind, num_gpus=candidate.num_gpus, links=links, gpu_bytes=memory)
    forecast = forecast_work(build_work(row), candidate, machine)
    if forecast.memory is None and cuts:  # the cut that was made cannot be followed: that which times would choose
        forecast = forecast_work(build_work(row), replace(candidate, cuts=None), machine)
    return forecast


def foretell(row: Row) -> Row:
    """Return what is forecast of a configuration, as fields of its row; none where it is refused."""
    forecast = forecast_row(row)
    if forecast.memory is None:
        return {}
    memory = forecast.memory
    return {"forecast_reserved": memory.reserved, "forecast_used": memory.used, "forecast_seconds": forecast.seconds}


def list_changes(row: Row) -> list[str]:
    """Return what of a stored row's step is other code today than when it was measured (2026-11-22 and 23).

    Its forecast is of today's: a difference says what was changed, not how near a forecast is.
    """
    fast = row["kernels"] == "fast" or row["spatial"] > 1 or row["checkpoint"] is not None
    found = {"kernels and slabs": fast, "recordings": row["recorded"], "stages": row["pipeline"] > 1}
    return [name for name, is_so in found.items() if is_so]


def compare(
    rows: Sequence[Row], tell: Callable[[Row], None], find: Callable[[Row], Forecast] = forecast_row
) -> list[Row]:
    """Return a row for each configuration that was measured: forecast over measured, less one.

    Parameters
    ----------
    rows : sequence of dict
        As ``plan_accuracy.py`` wrote them.
    tell : callable
        Takes each as it is done.
    find : callable
        Forecasts one.
    """
    compared: list[Row] = []
    for row in rows:
        if "failed" in row or "out_of_memory" in row:
            continue
        forecast = find(row)
        found: Row = {"name": row["name"], "net": row["net"], "changed_since": list_changes(row)}
        if forecast.memory is None or forecast.seconds is None:
            found["refused"] = forecast.refused
        else:
            # Of several GPUs that of which more is forecast is what counts: where it is full, nothing fits.
            memory, reserved = forecast.memory, max(row["max_memory_reserved"])
            beside = max(row["beside"]["end"])
            found |= {"measured_reserved": reserved, "forecast_reserved": memory.reserved}
            found |= {"measured_used": max(row["max_memory_allocated"]), "forecast_used": memory.used}
            found |= {"measured_outside": beside, "forecast_outside": memory.outside}
            found |= {"measured_seconds": row["seconds_not_waited_for"], "forecast_seconds": forecast.seconds}
            for what in ("reserved", "used", "seconds"):
                found[f"{what}_error"] = found[f"forecast_{what}"] / found[f"measured_{what}"] - 1
            total = (found["forecast_reserved"] + found["forecast_outside"]) / (reserved + beside)
            found["total_error"] = total - 1
        compared.append(found)
        tell(found)
    return compared


def describe(found: Row) -> str:
    """Return a compared row as one line."""
    if "refused" in found:
        return f"{found['name']}: not forecast: {found['refused']}"
    parts = [f"{what} {found[f'{what}_error']:+.1%}" for what in ("used", "reserved", "total", "seconds")]
    return f"{found['name']}: " + ", ".join(parts)


def summarise(compared: Sequence[Row]) -> Row:
    """Return the median and the worst error of each kind, without signs."""
    sound = [found for found in compared if "refused" not in found]
    told: Row = {"compared": len(sound), "not_forecast": len(compared) - len(sound)}
    for what in ("used", "reserved", "total", "seconds") if sound else ():
        errors = [abs(found[f"{what}_error"]) for found in sound]
        worst = max(sound, key=lambda found: abs(found[f"{what}_error"]))
        told[what] = {"median": statistics.median(errors), "worst": max(errors), "worst_of": worst["name"]}
    return told


def plot(compared: Sequence[Row], path: Path) -> None:
    """Draw forecast over measured reserved memory; the lines are equality, and ten percent on either side."""
    sound = [found for found in compared if "refused" not in found]
    side, left, top = 420.0, 60.0, 30.0
    most = 1.05 * max((max(found["measured_reserved"], found["forecast_reserved"]) for found in sound), default=GIB)

    def place(measured: float, forecast: float) -> tuple[float, float]:
        return left + side * measured / most, top + side * (1 - forecast / most)

    drawn = [text(10, top - 12, "reserved memory: forecast (GiB) over measured (GiB)")]
    for tick in range(5):
        size = most * tick / 4
        x, y = place(size, size)
        drawn += [text(10, y + 4, f"{size / GIB:.1f}"), rectangle(left, y, side, 1, "#ddd")]
        drawn.append(text(x - 8, top + side + 18, f"{size / GIB:.1f}"))
    drawn += [
        line([place(0, 0), place(most / max(1, slope), min(most, slope * most))], "#999") for slope in (0.9, 1, 1.1)
    ]
    drawn += [
        circle(place(found["measured_reserved"], found["forecast_reserved"]), COLOURS.get(found["net"], "#777"))
        for found in sound
    ]
    for number, (net, colour) in enumerate(COLOURS.items()):
        drawn += [circle((left + side + 20, top + 16 * number), colour)]
        drawn.append(text(left + side + 30, top + 16 * number + 4, net))
    write(path, drawn, left + side + 130, top + side + 40)


def draw_random(count: int, limit_gib: float, seed: int = 0) -> Iterator[Row]:
    """Yield configurations at random sizes, each run in the way that ``auto`` would choose of those that are tried.

    Their processes are given no more of a GPU than what was counted on. Who runs out of memory was forecast wrongly.
    """
    chance = random.Random(seed)  # noqa: S311 (no secrets)
    kind, capacity = find_kind("h200"), int(limit_gib * GIB)
    ways = [{"kernels": "torch"}, {"kernels": "fast"}, {"kernels": "fast", "recorded": True}]
    ways += [{"kernels": "fast", "checkpoint": "all"}, {"kernels": "fast", "spatial": 2}]
    ways += [{"kernels": "fast", "spatial": 2, "checkpoint": "all"}]
    plain = next(row for row in list_rows() if row["net"] == "dynunet")
    while count:
        size = {"patch": [32 * chance.randint(2, 9) for _ in range(3)], "batch": chance.randint(1, 4)}
        row = {**plain, **size, "net": chance.choice(["vnet", "unet", "dynunet", "segresnet"]), "history": False}
        row["precision"] = chance.choice(["bf16", "bf16", "fp32"])
        forecasts = [judge(forecast_row({**row, **way}), capacity) for way in ways]
        chosen, _ = choose(forecasts, capacity)
        if chosen is None or chosen.memory is None:
            continue
        memory, way = chosen.memory, ways[forecasts.index(chosen)]
        limit = capacity - memory.outside
        yield {
            **row,
            **way,
            "limit_bytes": limit,
            "forecast_reserved": memory.reserved,
            "forecast_seconds": chosen.seconds,
        } | {"gpu_bytes": kind.memory}
        count -= 1
