"""What is forecast of the configurations that ``plan_accuracy.py`` measured, beside what it measured: errors, plot."""

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plan_accuracy_rows import CLASSES, NETWORKS, Row, build_step, fill_row, make_optimizer
from results import Series, plot_series
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.estimate.candidate import Batch, Candidate, Estimate, Freedom, Step, Work, list_candidates, relieve
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.instances import get_links
from volseg.estimate.search import choose, judge, search
from volseg.estimate.step_memory import MemoryUse
from volseg.models.networks import build_network
from volseg.workflow.precision import Precision

COLOURS = {"vnet": "#d9a441", "unet": "#5aa05a", "dynunet": "#1b6ca8", "segresnet": "#a04f8c", "swinunetr": "#b5442e"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GIB = 2**30
WAYS = ("spatial", "pipeline", "split_size", "checkpoint", "kernels", "recorded")
"""Fields of a row that say how it is run."""
SIZE = ("net", "patch", "batch", "precision", "ema", "layout")
"""Fields that say what is run."""
AS_FAST = 1.02
"""Two ways whose times differ by less are as fast as each other."""


def build_work(row: Row) -> Work:
    """Return the step of a configuration, as it is measured, for whoever follows it."""
    shape = (row["batch"], 1, *row["patch"])

    net = build_network(NETWORKS[row["net"]], in_channels=1, out_channels=CLASSES, patch_size=row["patch"])
    if row["layout"] == "channels_last":
        net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def make_batch(rows: int, device: torch.device) -> Batch:
        size = (rows, 1, *row["patch"])
        return {"image": torch.zeros(size, device=device), "label": torch.zeros(size, dtype=torch.uint8, device=device)}

    def build_row_step(model: nn.Module, optimizer: Optimizer) -> Step:
        precision = Precision(next(model.parameters()).device.type, DTYPES[row["precision"]])
        step, average = build_step(row, model, model, optimizer, precision, record=False)

        def run(batch: Batch) -> Any:
            losses = step({name: field for name, field in batch.items() if isinstance(field, Tensor)})
            average()
            return losses

        return run

    return Work(
        build=net.train,
        shape=shape,
        make_batch=make_batch,
        build_optimizer=partial(make_optimizer, on_gpu=True),
        build_step=build_row_step,
        precision=DTYPES[row["precision"]],
        name=row["net"],
    )


def forecast_row(row: Row, gpu: str = "h200", gpu_bytes: int | None = None) -> Estimate:
    """Return what is forecast of a configuration, on a GPU of its kind or of another memory."""
    kind = find_kind(gpu)
    # A pipeline is cut by times that are measured when it starts: what is compared is the cut that was made.
    cuts = tuple(stage["begins"] for stage in row["partition"][1:]) if "partition" in row else None
    candidate = Candidate(**{name: row[name] for name in WAYS}, cuts=cuts)
    links, memory = get_links(kind), gpu_bytes or kind.memory
    machine = Machine(gpu=kind, num_gpus=candidate.num_gpus, links=links, gpu_bytes=memory)
    planned = Planned(work=build_work(row), machine=machine)
    forecast = planned.follow(candidate)
    if forecast.memory is None and cuts:  # the cut that was made cannot be followed: that which times would choose
        forecast = planned.follow(replace(candidate, cuts=None))
    return forecast


def name_gpu(report: Row) -> str:
    """Return the name of the GPUs that a result was measured on; the first results, of an H200, do not say it."""
    gpus = (report.get("environment") or {}).get("gpus")
    return gpus[0]["name"] if gpus else "h200"


def compare(
    rows: Sequence[Row], tell: Callable[[Row], None], gpu: str = "h200", find: Callable[[Row], Estimate] | None = None
) -> list[Row]:
    """Return a row for each configuration that was measured: forecast over measured, less one.

    Parameters
    ----------
    rows : sequence of dict
        As ``plan_accuracy.py`` wrote them.
    tell : callable
        Takes each as it is done.
    gpu : str
        The kind that they were measured on.
    find : callable
        Forecasts one; by default `forecast_row`, within what was counted on.
    """
    find = find or (lambda row: forecast_row(row, gpu, row.get("capacity")))
    compared: list[Row] = []
    for row in rows:
        if "failed" in row or "out_of_memory" in row:
            continue
        forecast = find(row)
        found: Row = {"name": row["name"], "net": row["net"]}
        if forecast.memory is None or forecast.seconds is None:
            found["refused"] = forecast.refused
        else:
            # Of several GPUs the fullest is what counts: where it is full, nothing fits.
            memory, reserved = forecast.memory, max(row["max_memory_reserved"])
            used = row["max_memory_allocated"][row["max_memory_reserved"].index(reserved)]
            beside = max(row["beside"]["end"])
            found |= {"measured_reserved": reserved, "forecast_reserved": memory.reserved}
            found |= {"measured_used": used, "forecast_used": memory.used}
            found |= {"measured_outside": beside, "forecast_outside": memory.outside}
            found |= {"measured_seconds": row["seconds_not_waited_for"], "forecast_seconds": forecast.seconds}
            for what in ("reserved", "used", "seconds"):
                found[f"{what}_error"] = found[f"forecast_{what}"] / found[f"measured_{what}"] - 1
            total = (found["forecast_reserved"] + found["forecast_outside"]) / (reserved + beside)
            found["total_error"] = total - 1
            found |= {"size": [row[name] for name in SIZE], "way": {name: row[name] for name in WAYS}}
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


def judge_choices(compared: Sequence[Row]) -> list[Row]:
    """Return, of each size that was run in several ways, what ``auto`` would choose, and what of that was measured.

    It chooses by the forecasts, as in a training, on GPUs of several memories: one that every way fits into by what was
    measured, and those halfway between what a way takes and what the next one takes.
    """
    sizes: dict[str, list[Row]] = {}
    for found in compared:
        if "refused" not in found:
            sizes.setdefault(" ".join(map(str, found["size"])), []).append(found)
    judged: list[Row] = []
    for size, ways in sizes.items():
        totals = sorted(way["measured_reserved"] + way["measured_outside"] for way in ways)
        between = [(less + more) // 2 for less, more in itertools.pairwise(totals)]
        capacities = [*between, 2 * totals[-1]] if len(ways) > 1 else []
        judged += [{"size": size, "capacity": bytes_, **_judge_choice(ways, bytes_)} for bytes_ in capacities]
    return judged


def _judge_choice(ways: Sequence[Row], capacity: int) -> Row:
    """Return what is chosen of some ways, whether it fitted, and its time over that of the fastest one that did."""
    named: dict[Candidate, Row] = {}
    forecasts = []
    for way in ways:
        sizes = {name: way[f"forecast_{name}"] for name in ("used", "reserved", "outside")}
        memory, candidate = MemoryUse(**sizes, peak_in=""), Candidate(**way["way"])
        named[candidate] = way
        forecast = Estimate(candidate=candidate, memory=memory, seconds=way["forecast_seconds"])
        forecasts.append(judge(forecast, capacity))
    chosen, _ = choose(forecasts, capacity)
    fitting = [way for way in ways if way["measured_reserved"] + way["measured_outside"] <= capacity]
    fastest = min(fitting, key=lambda way: way["measured_seconds"])
    told: Row = {"fastest": fastest["name"], "chosen": None, "fitted": False, "over_fastest": None}
    told["free_beside_fastest"] = 1 - (fastest["measured_reserved"] + fastest["measured_outside"]) / capacity
    if chosen is not None:
        way = named[chosen.candidate]
        told |= {"chosen": way["name"], "fitted": way in fitting}
        told["over_fastest"] = way["measured_seconds"] / fastest["measured_seconds"]
    return told


def plot(compared: Sequence[Row], path: Path) -> None:
    """Draw forecast over measured reserved memory; the lines are equality, and ten percent on either side."""
    sound = [found for found in compared if "refused" not in found]
    sizes = [(found["net"], found["measured_reserved"] / GIB, found["forecast_reserved"] / GIB) for found in sound]
    most = 1.05 * max((max(point) for _, *point in sizes), default=1.0)
    series = [
        Series(name=f"{slope:.0%}", colour="#999", points=[(0, 0), (most / slope, most)], is_line=True)
        for slope in (0.9, 1, 1.1)
    ]
    series += [
        Series(name=net, colour=COLOURS.get(net, "#777"), points=[(x, y) for one, x, y in sizes if one == net])
        for net in dict.fromkeys(net for net, *_ in sizes)
    ]
    plot_series(path, "reserved memory: forecast (GiB) over measured (GiB)", series, (most, most))


def draw_random(count: int, limit_gib: float, seed: int = 0) -> Iterator[Row]:
    """Yield configurations at random sizes, each run in the way that ``auto`` chooses on one GPU.

    Their processes are given no more of a GPU than what was counted on. Who runs out of memory was forecast wrongly.
    """
    chance = random.Random(seed)  # noqa: S311 (no secrets)
    capacity = int(limit_gib * GIB)
    plain = fill_row("dynunet")
    while count:
        size = {"patch": [32 * chance.randint(2, 9) for _ in range(3)], "batch": chance.randint(1, 4)}
        row = {**plain, **size, "net": chance.choice(["vnet", "unet", "dynunet", "segresnet"])}
        row["precision"] = chance.choice(["bf16", "bf16", "fp32"])
        chosen = choose_on_one(row, capacity)
        if chosen is None or chosen.memory is None:
            continue
        memory, candidate = chosen.memory, chosen.candidate
        yield {
            **row,
            **{name: getattr(candidate, name) for name in WAYS},
            "measured_s": 0.3,  # what is asked is whether it fits
            "capacity": capacity,
            "limit_bytes": capacity - memory.outside,
            "forecast_reserved": memory.reserved,
            "forecast_used": memory.used,
            "forecast_seconds": chosen.seconds,
        }
        count -= 1


def choose_on_one(row: Row, capacity: int) -> Estimate | None:
    """Return the forecast of what ``auto`` chooses on one GPU of so many bytes; None if nothing fits."""
    kind = find_kind("h200")
    machine = Machine(gpu=kind, num_gpus=1, links=get_links(kind), gpu_bytes=capacity)
    planned = Planned(work=build_work(row), machine=machine, free=Freedom(kernels=("fast", "torch")))
    listed = list_candidates(1, row["batch"], row["patch"], planned.free)
    found = search(
        listed,
        lambda each: planned.estimate(each, to_end=False),
        planned.capacity,
        row["batch"],
        lambda each: relieve(each, planned.free),
    )
    return found.chosen
