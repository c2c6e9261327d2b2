"""Measure spatial model parallelism: speed, scaling, memory, and the plain network beside it.

    python workflows/benchmarks/spatial.py --gpus 1 2 4 --output results.json

Rows of one number of GPUs run in one group of processes; after a failure the rest is started anew. Rows of the kind
`alone` train a network of its own on every GPU at the same time: what the GPUs of this host give together, for they
are not all equally fast. A row is forward, loss, backward and optimizer step in bf16 at batch 1, the median of several
steps. The JSON is rewritten after every group.

`--parts same` prints the peak of N GPUs against one Nth of that of one GPU, for the same volume; `--parts largest`
searches the largest cube that trains by whole steps that keep nothing they can recompute, and writes a table beside the
JSON. Where memory ends on one process the others wait in an exchange that has no answer: the group ends, and the search
goes on in a new one.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from networks_listed import CLASSES, build
from torch import Tensor

from volseg.commands import run_module
from volseg.losses.dice_cross_entropy import Terms, dice_cross_entropy
from volseg.parallel import ModelParallel
from volseg.parallel.batches import from_slab, slab_shape
from volseg.parallel.recorded_step import RecordedStep

Row = dict[str, Any]


def measure(row: Row) -> Row:
    """Return time per step, memory and loss of one configuration, in this process group."""
    from monai.losses import DiceCELoss

    cuda = torch.cuda.is_available()  # without, a dry run
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    shape = tuple(row["shape"])
    net = build(row["net"], shape, small=row.get("small", False)).to(device)
    model: Any
    plain = row["kind"] == "plain"
    alone = row["kind"] == "alone"
    if alone and not dist.is_initialized():
        dist.init_process_group(device_id=device if cuda else None)
    if alone:  # as many networks as GPUs, at the same time
        model, own = ModelParallel(net, strategy="spatial", devices=[device]), (1, 1, *shape)
    elif plain:
        layout = torch.channels_last_3d if row.get("channels_last") else torch.contiguous_format
        model = net.to(memory_format=layout)
        own = (1, 1, *shape)
    else:
        model = ModelParallel(
            net, strategy="spatial", checkpoint=row.get("checkpoint"), channels_last=row.get("channels_last")
        )
        own = slab_shape(model, (1, 1, *shape))
    # Each process makes its own planes: no process could hold a whole large volume.
    image: Any = torch.randn(own, device=device)
    label: Any = torch.randint(0, CLASSES, own, device=device, dtype=torch.uint8)
    if not plain and not alone:
        image, label = (from_slab(model, part, (1, 1, *shape)) for part in (image, label))  # type: ignore[arg-type]
    # The same loss twice: MONAI's holds sixty bytes per voxel by itself.
    monai_loss = plain or row.get("loss") == "monai"
    objective = DiceCELoss(softmax=True, to_onehot_y=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True)

    def step(image: Any, label: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            output = model(image)
        loss = objective(output.float(), label) if monai_loss else dice_cross_entropy(output, label, Terms())
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = RecordedStep(model, step) if row.get("graph") and cuda else step  # type: ignore[arg-type]
    for number in range(row.get("warm", 5)):
        if cuda and row.get("graph") and number == run.warm_up:  # this call records
            torch.cuda.reset_peak_memory_stats()
        loss = run(image, label)
    first_loss = float(loss)
    recorded = 0
    if cuda:
        torch.cuda.synchronize()
        recorded = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(row.get("steps", 8)):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = run(image, label)
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    # A graph's memory is in its private pool, reserved rather than allocated.
    peak = 0
    if cuda:
        peak = torch.cuda.memory_reserved() if row.get("graph") else torch.cuda.max_memory_allocated()
    voxels = shape[0] * shape[1] * shape[2]
    world = int(os.environ["WORLD_SIZE"])
    median = statistics.median(times)
    if alone:
        each: list[float] = [0.0] * world
        dist.all_gather_object(each, median)
        return {"ms_each": each, "ms": max(each), "mvoxel_per_s": sum(voxels / ms for ms in each) / 1e3}
    return {
        "ms": median,
        "ms_min": min(times),
        "ms_all": times,
        "mvoxel_per_s": voxels / median / 1e3,
        "peak_gib": peak / 2**30,
        "bytes_per_voxel": peak * world / voxels,
        # Of a graph: what was in use at once while it was recorded, without the gaps between.
        **({"used_bytes_per_voxel": recorded * world / voxels} if cuda and row.get("graph") else {}),
        "loss": first_loss,
        "loss_last": float(loss),
    }


def worker(wanted: list[Row], path: Path) -> None:
    """Run rows on this rank; the first rank writes each when it is done."""
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    results: list[Row] = []

    def tell(further: list[Row]) -> None:
        if (
            path.exists()
            and len(told := json.loads(path.read_text(encoding="utf-8"))) == len(results)
            and "ended" in told[-1]
        ):
            return  # a rank ran out of memory, and whatever this one met is its absence
        # Several ranks may run out of memory at once: each writes a whole file.
        own = path.with_suffix(f".{os.environ['RANK']}")
        own.write_text(json.dumps(results + further), encoding="utf-8")
        own.replace(path)

    for row in wanted:
        torch.backends.cudnn.benchmark = bool(row.get("cudnn_benchmark", False))
        begin = time.time()
        try:
            results.append(_searched(row, tell) if row["kind"] == "largest" else measure(row))
        except Exception:  # the others may wait for this rank: end, and let the launcher start the rest anew
            results.append({"error": traceback.format_exc()[-2000:]})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        results[-1]["wall_s"] = time.time() - begin
        lost = "error" in results[-1] or "ended" in results[-1]
        if int(os.environ["RANK"]) == 0 or lost:
            tell([])
        if lost:
            os._exit(1)
    # Not destroy_process_group: NCCL waits there for captured graphs that are still alive.
    os._exit(0)


def _searched(row: Row, tell: Callable[[list[Row]], None]) -> Row:
    def attempt(shape: list[int]) -> Row:
        return measure(row | {"kind": "spatial", "shape": shape})

    return search(row, attempt, lambda found: tell([found]) if int(os.environ["RANK"]) == 0 else None)


BYTES_PER_VOXEL = 480
"""Where the search begins; a wrong value costs tries, not the result."""


def forecast(memory_bytes: float, gpus: int, multiple: int) -> int:
    """Return the side to try first."""
    side = (0.95 * memory_bytes * gpus / BYTES_PER_VOXEL) ** (1 / 3)
    return max(multiple, int(side) // multiple * multiple)


def next_side(tries: Sequence[Row], first: int, multiple: int) -> int | None:
    """Return the side to try next, or None where the largest is known.

    From the first guess in growing strides until one side fits and another does not, then by halves.
    """
    fitting = [attempt["side"] for attempt in tries if attempt["fits"]]
    failing = [attempt["side"] for attempt in tries if not attempt["fits"]]
    if not tries:
        return first
    low, high = max(fitting, default=0), min(failing, default=0)
    if not failing:
        return low + multiple * 2 ** (len(fitting) - 1)
    if high - low <= multiple:
        return None
    if not fitting:
        return max(multiple, high - multiple * 2 ** (len(failing) - 1))
    return low + (high - low) // multiple // 2 * multiple


def search(row: Row, measure: Callable[[list[int]], Row], tell: Callable[[Row], None]) -> Row:
    """Go on with the tries of ``row`` in this group of processes; every process calls this.

    ``tell`` is given what is known after each try. The result has ``"ended"`` where memory ended: this group is of no
    further use then.
    """
    found: Row = {"tries": list(row.get("tries", ()))}
    memory = _memory(row.get("memory_gib"))
    first = row.get("first") or forecast(memory, row["gpus"], row["multiple"])
    while (side := next_side(found["tries"], first, row["multiple"])) is not None:
        try:
            attempt = measure([side] * 3)
            if dist.is_initialized():
                dist.barrier()  # it fits where it fits on every process
        except (RuntimeError, MemoryError) as fault:
            if not _is_out_of_memory(fault):
                raise
            found["tries"].append({"side": side, "fits": False, "why": str(fault).partition("\n")[0][:300]})
            return found | {"ended": "out of memory"}
        found["tries"].append({"side": side, "fits": True, **attempt})
        tell(found)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def _memory(limit_gib: float | None) -> float:
    """Return the bytes that this process may use; where asked for, let it have no more."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if limit_gib:
            torch.cuda.set_per_process_memory_fraction(limit_gib * 2**30 / total)
        return limit_gib * 2**30 if limit_gib else total
    if not limit_gib:
        return 2**30  # a dry run
    limit = int(limit_gib * 2**30)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, resource.RLIM_INFINITY))
    return limit


def _is_out_of_memory(fault: BaseException) -> bool:
    # Libraries below torch, and torch on a CPU, raise a plain RuntimeError.
    told = str(fault).lower()
    return isinstance(fault, MemoryError) or "out of memory" in told or "can't allocate memory" in told


def finished(row: Row) -> bool:
    """Say whether the search of this row has an answer."""
    tries = row.get("tries") or []
    return bool(tries) and next_side(tries, 0, row["multiple"]) is None


def _ends(row: Row) -> tuple[Row | None, int | None]:
    """Return the largest try that fitted, and the smallest side that did not."""
    tries = row.get("tries") or []
    fitting = max((attempt for attempt in tries if attempt["fits"]), key=lambda attempt: attempt["side"], default=None)
    return fitting, min((attempt["side"] for attempt in tries if not attempt["fits"]), default=None)


def table(found: Sequence[Row]) -> str:
    """Return the searches as a table in Markdown."""
    lines = [
        "| network | GPUs | largest cube | Mvoxel | GiB per GPU | bytes per voxel | s per step | did not fit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        best, above = _ends(row)
        refused = " ".join([f"{above}^3"] * bool(above) + ["(search not finished)"] * (not finished(row)))
        if best is None:
            lines.append(f"| {row['net']} | {row['gpus']} | none | | | | | {refused} |")
            continue
        side = best["side"]
        lines.append(
            f"| {row['net']} | {row['gpus']} | {side}^3 | {side**3 / 1e6:.0f} | {best['peak_gib']:.1f} "
            f"| {best['bytes_per_voxel']:.0f} | {best['ms'] / 1e3:.2f} | {refused} |"
        )
    return "\n".join(lines)


def same_volume(found: list[Row]) -> list[Row]:
    """Return the peak on N GPUs over one Nth of the peak on one, where both ran the same volume."""
    peaks = {
        (row["net"], row["gpus"]): row["peak_gib"] for row in found if row["part"] == "same" and row.get("peak_gib")
    }
    return [
        {"net": net, "gpus": gpus, "peak_over_share_of_one": peak * gpus / peaks[net, 1]}
        for (net, gpus), peak in peaks.items()
        if gpus > 1 and (net, 1) in peaks
    ]


def rows(gpus: list[int], chosen: set[str]) -> list[Row]:
    """Return what to measure, the most telling first."""
    found: list[Row] = []
    for net in ("DynUNet", "VNet"):
        found += [
            {"part": "plain", "kind": "plain", "net": net, "gpus": 1, "shape": [128] * 3, "channels_last": last}
            for last in (False, True)
        ]
    for net in ("DynUNet", "VNet"):
        for count in gpus:
            common = {"kind": "spatial", "net": net, "gpus": count}
            found += [
                {"part": "weak128", **common, "shape": [128 * count, 128, 128], "graph": True},
                {"part": "weak320", **common, "shape": [160 * count, 320, 320], "graph": True, "steps": 5},
                {"part": "strong256", **common, "shape": [256] * 3, "graph": True},
            ]
            if count > 1:
                each = {"kind": "alone", "net": net, "gpus": count, "graph": True}
                found.append({"part": "alone128", **each, "shape": [128] * 3})
                found.append({"part": "alone320", **each, "shape": [160, 320, 320], "steps": 5})
            found.append({"part": "eager128", **common, "shape": [128 * count, 128, 128]})
            found.append({"part": "eager320", **common, "shape": [160 * count, 320, 320], "steps": 4, "warm": 3})
            found.append({"part": "checkpoint", **common, "shape": [160 * count, 320, 320], "checkpoint": "all"})
            found.append({"part": "tiled", **common, "shape": [160 * count, 320, 320], "checkpoint": "tiled"})
            found.append({"part": "same", **common, "shape": [640, 320, 320], "steps": 3, "warm": 3})
    for count in gpus:
        common = {"kind": "spatial", "net": "DynUNet", "gpus": count, "checkpoint": "all", "steps": 2, "warm": 1}
        found.append({"part": "huge", **common, "shape": [1024, 512, 512]})
        found.append({"part": "largest", **common, "kind": "largest", "steps": 1})
    return [row for row in found if not chosen or row["part"] in chosen]


def main() -> None:
    """Run all rows and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[torch.cuda.device_count()])
    parser.add_argument("--parts", nargs="*", default=[])
    parser.add_argument("--nets", nargs="*", default=["DynUNet", "VNet"])
    parser.add_argument("--rows", help="JSON list of rows to run instead")
    parser.add_argument("--limit", type=float, default=30, help="seconds per row")
    parser.add_argument("--search", type=float, default=180, help="seconds per search of the largest cube")
    parser.add_argument("--memory", type=float, help="GiB that each process may use; the searches find what then fits")
    parser.add_argument("--multiple", type=int, default=64, help="sides that the searches try are multiples of this")
    parser.add_argument("--total", type=float, default=500, help="seconds after which no row is started")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling.json"))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(arguments.rows) if arguments.rows else rows(arguments.gpus, set(arguments.parts))
    for row in wanted:
        if row["kind"] == "largest":
            row |= {"multiple": arguments.multiple, "memory_gib": arguments.memory}
    report: Row = {
        "command": " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }
    begin = time.time()
    waiting = [row for row in wanted if row["net"] in arguments.nets]
    number = 0
    while waiting and time.time() - begin < arguments.total:
        number += 1
        batch = [row for row in waiting if row["gpus"] == waiting[0]["gpus"]]
        seconds = sum(arguments.search if row["kind"] == "largest" else arguments.limit for row in batch)
        limit = min(arguments.total - (time.time() - begin), 40 + seconds)
        results = launch(batch, arguments.output.with_suffix(f".{number}.tmp"), limit, number)
        for row, result in zip(batch, results, strict=False):
            row |= result
            if row.pop("ended", None) and not finished(row):
                continue  # the search goes on in a new group
            waiting = [other for other in waiting if other is not row]
            report["rows"].append(row)
            told = {key: value for key, value in row.items() if key not in ("ms_all", "kind", "steps", "tries")}
            told |= {key: round(value, 3) for key, value in told.items() if isinstance(value, float)}
            print(json.dumps(told), flush=True)
        write(report, arguments.output)
    report["rows"] += [row | {"error": "not finished: out of time"} for row in waiting]
    write(report, arguments.output)
    if searched := [row for row in report["rows"] if row["kind"] == "largest"]:
        print(table(searched))
    for ratio in report.get("same_volume", ()):
        print("same volume, peak over one GPU's share:", json.dumps(ratio))


def write(report: Row, path: Path) -> None:
    """Write the JSON, and beside it the table of the largest cubes."""
    if ratios := same_volume(report["rows"]):
        report["same_volume"] = ratios
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if searched := [row for row in report["rows"] if row["kind"] == "largest"]:
        path.with_suffix(".md").write_text(table(searched) + "\n", encoding="utf-8")


def launch(batch: list[Row], path: Path, limit: float, number: int) -> list[Row]:
    """Run rows of one number of GPUs in one group of processes; the last result may be an error."""
    command = run_module("torch.distributed.run", "--nproc-per-node", str(batch[0]["gpus"]))
    command += ["--master-port", str(29600 + number), __file__, "--worker", json.dumps(batch), str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8") as group:
        try:
            error = group.communicate(timeout=limit)[1][-2000:]
        except subprocess.TimeoutExpired:
            group.terminate()  # killed, the launcher would leave its processes behind, and their memory taken
            error = "took too long" + group.communicate()[1][-1500:]
    results: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.unlink(missing_ok=True)
    lost = results and ("error" in results[-1] or "ended" in results[-1])
    if group.returncode and not lost:
        # A search that was cut short has told its tries so far.
        if results and batch[len(results) - 1]["kind"] == "largest" and "wall_s" not in results[-1]:
            results[-1]["error"] = error
        elif len(results) < len(batch):
            results.append({"error": error})
    return results


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-2]), Path(sys.argv[-1]))
    main()
