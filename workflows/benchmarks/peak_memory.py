"""What is alive where a training step takes most memory: followed on a GPU that is not there, block by block.

    python workflows/benchmarks/peak_memory.py --net dynunet --shape 160 320 320 --checkpoint all

prints the bytes per voxel that are used and reserved, and every block of memory that is alive at the peak: how much,
who asked for it, in which layer, and in which part of the step. It takes seconds and no GPU. ``--json`` appends what
was found, with the command that found it, for a table.

    python workflows/benchmarks/peak_memory.py --net vnet --shape 128 128 128 --recorded --pools

says besides what the step would reserve with other settings of the allocator, and if a recording first took one block
of so much as it uses at once, for all others to be cut from.
"""

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import networks_listed
import torch
from spatial import build
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from volseg.estimate.allocator import VARIABLES, Allocator, AllocatorSettings, find_memory_use
from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.trace import Allocate, Event, Free, KernelRun, Mark, StepTrace
from volseg.estimate.tracing import TracedStep
from volseg.estimate.work import Work
from volseg.losses.dice_cross_entropy import Terms, dice_cross_entropy

CLASSES = 3
BESIDE = (
    *("volseg/estimate/", "volseg/device/fake_gpu", "volseg/device/torch_internals", "volseg/device/fake_internals"),
    *("peak_memory", "/torch/"),
)
"""Code that is on every call's way to a block of memory."""


class Owner(NamedTuple):
    """Who asked for a block."""

    layer: str
    place: str


def main() -> None:
    """Follow a step, and print what is alive at its peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="dynunet", choices=("dynunet", "vnet", "small", "segresnet"))
    parser.add_argument("--shape", type=int, nargs=3, default=[160, 320, 320], metavar=("D", "H", "W"))
    parser.add_argument("--checkpoint", default=None, help="all, tiled, or a number of finest levels")
    parser.add_argument("--recorded", action="store_true", help="as one CUDA graph")
    parser.add_argument("--gpus", type=int, default=1, help="which share the volume, a process each")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--least", type=float, default=1.0, help="bytes per voxel of what is listed by itself")
    parser.add_argument("--pools", action="store_true", help="try other ways to reserve memory")
    parser.add_argument("--json", type=Path, help="list of results to append to")
    chosen = parser.parse_args()
    levels = chosen.checkpoint
    checkpoint = int(levels) if levels is not None and levels.isdigit() else levels
    candidate = Candidate(spatial=chosen.gpus, checkpoint=checkpoint, recorded=chosen.recorded)
    owners: dict[int, Owner] = {}
    with noting_owners(owners):
        traces = trace_candidate(
            describe_work(chosen.net, chosen.shape, chosen.recorded), candidate, find_kind(chosen.gpu)
        )
    found = summarise(traces[-1], chosen, owners)
    if chosen.pools:
        found["reserved_otherwise"] = reserve_otherwise(traces[-1], prod(chosen.shape) / chosen.gpus)
        print(json.dumps(found["reserved_otherwise"]))
    if chosen.json is not None:
        before = json.loads(chosen.json.read_text(encoding="utf-8")) if chosen.json.exists() else []
        chosen.json.write_text(json.dumps([*before, found], indent=1) + "\n", encoding="utf-8")


def describe_work(net: str, shape: Sequence[int], recorded: bool = False) -> Work:
    """Return the step that ``spatial.py`` measures; a recorded one by Adam, whose rate may be a tensor."""

    def make_batch(rows: int, device: torch.device) -> dict[str, Tensor]:
        size = rows, 1, *shape
        label = torch.empty(size, dtype=torch.uint8, device=device)
        return {"image": torch.empty(size, device=device), "label": label}

    def build_step(model: nn.Module, optimizer: Optimizer) -> Any:
        def step(batch: dict[str, Any]) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(batch["image"].device.type, torch.bfloat16):
                output = model(batch["image"])
            loss = dice_cross_entropy(output, batch["label"], Terms())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return Work(
        build=partial(networks_listed.build, "SegResNet", (shape[0], shape[1], shape[2]))
        if net == "segresnet"
        else partial(build, net),
        shape=(1, 1, *shape),
        make_batch=make_batch,
        build_optimizer=lambda model: (
            Adam(model.parameters(), 1e-3, fused=True)
            if recorded
            else SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True)
        ),
        build_step=build_step,
        precision=torch.bfloat16,
        name=net,
    )


@contextmanager
def noting_owners(owners: dict[int, Owner]) -> Iterator[None]:
    """Note who asks for each block, by its number."""
    take = TracedStep._take

    def take_and_note(self: TracedStep, key: int, *args: Any) -> None:
        take(self, key, *args)
        owners[self._blocks] = find_owner()

    TracedStep._take = take_and_note  # type: ignore[method-assign]
    try:
        yield
    finally:
        TracedStep._take = take  # type: ignore[method-assign]


def find_owner() -> Owner:
    """Read the layer and the place in our code off the call stack."""
    places: list[str] = []
    layer = ""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module) and not layer:
            layer = type(caller).__name__
        if "/volseg/" in path and not any(part in path for part in BESIDE):
            places.append(f"{Path(path).stem}.{frame.f_code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    return Owner(layer, " < ".join(places[:3]))


def summarise(trace: StepTrace, chosen: argparse.Namespace, owners: dict[int, Owner]) -> dict[str, Any]:
    """Print what is alive at the peak; return the figures."""
    voxels = prod(chosen.shape) / chosen.gpus
    part, used, peak = "", 0, 0
    alive: dict[int, tuple[int, str]] = {}
    at_peak: dict[int, tuple[int, str]] = {}
    of_parts: Counter[str] = Counter()
    for event in trace.events:
        match event:
            case Allocate(block, size):
                alive[block] = size, part
                used += size
                of_parts[part] = max(of_parts[part], used)
                if used > peak:
                    peak, at_peak = used, dict(alive)
            case Free(block):
                used -= alive.pop(block)[0]
            case Mark(name):
                part = name
    use = find_memory_use(trace, AllocatorSettings.find())
    kernels = [event for event in trace.events if isinstance(event, KernelRun)]
    seconds = sum(map(find_kind(chosen.gpu).seconds, kernels[len(kernels) // 2 :]))
    for block, (size, when) in at_peak.items():
        if size / voxels >= chosen.least:
            print(f"{size / voxels:8.1f}  {when:9}  {owners[block].layer:24}  {owners[block].place}")
    rest = sum(size for size, _ in at_peak.values() if size / voxels < chosen.least)
    print(f"{rest / voxels:8.1f}  in smaller blocks")
    settings = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    found = {
        "command": " ".join([*settings, "python", shlex.join(sys.argv)]),
        "torch": torch.__version__,
        "net": chosen.net,
        "shape": chosen.shape,
        "gpus": chosen.gpus,
        "checkpoint": chosen.checkpoint,
        "recorded": chosen.recorded,
        "expandable_segments": AllocatorSettings.find().expandable_segments,
        "used_bytes_per_voxel": round(use.used / voxels, 1),
        "reserved_bytes_per_voxel": round(use.reserved / voxels, 1),
        "peaks_of_parts": {name: round(size / voxels, 1) for name, size in of_parts.items()},
        "kernels_ms": round(seconds * 1e3, 1),
    }
    print(json.dumps(found))
    return found


def reserve_otherwise(trace: StepTrace, voxels: float) -> dict[str, float]:
    """Return the bytes per voxel that are reserved in the end, in several ways."""
    plain, used = AllocatorSettings(), count_recorded_bytes(trace)
    found = {"used by the recording": used, "as it is": count_reserved(trace, plain)}
    found["expandable segments"] = count_reserved(trace, AllocatorSettings(expandable_segments=True))
    for part in (0.9, 1.0, 1.05):
        found[f"first block {part:.2f}"] = count_reserved(take_block_first(trace, int(part * used)), plain)
    return {name: round(size / voxels, 1) for name, size in found.items()}


def count_reserved(trace: StepTrace, settings: AllocatorSettings) -> int:
    """Return the bytes that are reserved at the end of a trace: what ran before a recording has given its own back."""
    allocator = Allocator(settings)
    for event in trace.events:
        match event:
            case Allocate(block, size, stream, pool):
                allocator.take(block, size, stream, pool)
            case Free(block):
                allocator.give_back(block)
            case Mark("empty_cache"):
                allocator.empty_cache()
    return allocator.reserved


def count_recorded_bytes(trace: StepTrace) -> int:
    """Return the bytes of a recording's own memory that are in use at once."""
    sizes: dict[int, int] = {}
    used = peak = 0
    for event in trace.events:
        if isinstance(event, Allocate) and event.pool:
            sizes[event.block] = event.size
            used += event.size
            peak = max(peak, used)
        elif isinstance(event, Free):
            used -= sizes.pop(event.block, 0)
    return peak


def take_block_first(trace: StepTrace, size: int) -> StepTrace:
    """Return the trace with a block taken and given back where a recording's memory begins."""
    events: list[Event] = []
    first = next((event for event in trace.events if isinstance(event, Allocate) and event.pool), None)
    for event in trace.events:
        if event is first:
            events += [Allocate(-1, size, event.stream, event.pool), Free(-1)]
        events.append(event)
    return StepTrace(tuple(events), trace.device)


if __name__ == "__main__":
    main()
