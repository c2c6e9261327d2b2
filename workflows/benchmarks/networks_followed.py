"""Which kernels a training step of each network has, plain and ours, by kind: counted on a GPU that is not there.

    python workflows/benchmarks/networks_followed.py --result workflows/benchmarks/results/networks_followed.json

A step (forward, loss, backward, SGD; bfloat16, one volume) is followed on a pretended H200: how often each kernel runs,
the bytes that it moves and its forecast milliseconds. ``fused`` kernels are convolutions, products, and kernels of our
own that do several things at once; the others are what is left to fuse. No time in here was measured.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from networks_listed import NETWORKS, build, find_logits
from torch import nn
from torch.optim import Optimizer

from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.gpu_kinds import GpuKind, find_kind
from volseg.estimate.kernel_class import LAID_OUT_ANEW
from volseg.estimate.step_time import PARTS, select_step
from volseg.estimate.trace import KernelRun, Mark, StepTrace
from volseg.estimate.work import Batch, Step, Work
from volseg.losses.dice_cross_entropy import Terms, dice_cross_entropy

__all__ = ["WAYS", "describe", "find_kind_of", "follow", "summarise"]

WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"kernels": "torch"},
    "plain, channels last": {"kernels": "torch", "channels_last": True},
    "ours": {"kernels": "fast", "recorded": True},
}

KINDS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("transposed convolution", ("transposed",)),
    ("convolution", ("convolution", "few_taps", "many_taps", "one_voxel", "depthwise")),
    ("norm of ours", ("norm.passes", "norm.statistics", "norm.addition")),
    ("loss of ours", ("losses.",)),
    ("batch norm", ("batch_norm",)),
    ("group norm", ("group_norm",)),
    ("layer norm", ("layer_norm",)),
    ("product", ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "attention")),
    ("layout", (LAID_OUT_ANEW,)),
    ("optimizer", ("_foreach", "_fused_sgd")),
    ("softmax", ("softmax",)),
    ("pooling", ("pool",)),
    ("interpolation", ("upsample", "doubling")),
    ("joining", ("aten.cat", "aten.stack", "slice_backward", "select_backward", "split_with_sizes")),
    ("padding, rolling, indexing", ("pad", "roll", "index", "gather", "scatter", "_unsafe_index")),
    ("copy", ("clone", "copy_", "_to_copy", "contiguous")),
    ("filling", ("fill", "zero", "ones", "full", "arange", "rand")),
    ("sum", ("aten.sum", "aten.mean", "aten.var", "aten.std", "amax", "amin", "linalg_vector_norm", "aten.prod")),
    ("activation", ("relu", "gelu", "sigmoid", "elu", "threshold", "tanh", "silu", "softplus")),
    ("arithmetic", ("aten.",)),
)
"""Kinds of kernels by what their names hold; the first that fits."""

FUSED = ("convolution", "transposed convolution", "norm of ours", "loss of ours", "product", "optimizer")


def main() -> None:
    """Follow each network each way, and write what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--sides", type=int, nargs=3, default=(128, 128, 128), metavar=("D", "H", "W"))
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "gpu": chosen.gpu, "sides": chosen.sides}
    result["networks"] = {}
    if chosen.result.exists():  # what was followed before stays
        result["networks"] = json.loads(chosen.result.read_text(encoding="utf-8"))["networks"]
    for name in chosen.networks:
        for way in chosen.ways:
            found = follow(name, tuple(chosen.sides), WAYS[way], find_kind(chosen.gpu))
            result["networks"].setdefault(name, {})[way] = found
            print(describe(name, way, found), flush=True)
            chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def follow(name: str, sides: tuple[int, int, int], way: Mapping[str, Any], gpu: GpuKind) -> dict[str, Any]:
    """Return what a step of a network has, or why it cannot be followed."""
    options = {key: value for key, value in way.items() if key != "channels_last"}
    work = make_work(name, sides, channels_last=way.get("channels_last", False))
    try:
        [trace] = trace_candidate(work, Candidate(**options), gpu)
    except Exception as fault:  # a row of the table all the same, and what it says is the finding
        return {"refused": f"{type(fault).__name__}: {fault}"}
    return summarise(trace, gpu)


def make_work(name: str, sides: tuple[int, int, int], *, channels_last: bool) -> Work:
    """Return the step of a network; the loss is ours in every way, for the network is what is looked at."""
    net = build(name, sides)
    if channels_last:
        net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def make_batch(rows: int, device: torch.device) -> Batch:
        size = (rows, 1, *sides)
        return {"image": torch.zeros(size, device=device), "label": torch.zeros(size, dtype=torch.uint8, device=device)}

    def make_optimizer(model: nn.Module) -> Optimizer:
        # Fused: a recording reads the learning rate on the device.
        return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True, fused=True)

    def build_step(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(batch: Batch) -> Any:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(batch["image"].device.type, torch.bfloat16):
                logits = find_logits(model(batch["image"]))
            loss = dice_cross_entropy(logits, batch["label"], Terms())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return Work(
        build=net.train,
        shape=(1, 1, *sides),
        make_batch=make_batch,
        build_optimizer=make_optimizer,
        build_step=build_step,
        precision=torch.bfloat16,
        name=name,
    )


def list_kernels(trace: StepTrace) -> Iterator[tuple[str, KernelRun]]:
    """Yield the kernels of one step, each with the part of the step that it belongs to."""
    part = "rest"
    for event in select_step(trace.events):
        if isinstance(event, Mark):
            part = event.name if event.name in PARTS else part
        elif isinstance(event, KernelRun):
            yield part, event


def find_kind_of(run: KernelRun) -> str:
    """Return which kind of kernel this is."""
    name = run.name
    if name.startswith("aten.convolution") and _grows(run):
        name = "transposed"
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other of ours")


def _grows(run: KernelRun) -> bool:
    """Say whether a convolution's way forward leads to a finer grid."""
    backward = run.name.startswith("aten.convolution_backward")
    coarse, fine = (run.shapes[1], run.shapes[0]) if backward else (run.shapes[0], run.shapes[-1])
    return fine[-1] > 1.5 * coarse[-1]


def summarise(trace: StepTrace, gpu: GpuKind) -> dict[str, Any]:
    """Return kernels by kind and by name, the dearest of what is not fused one by one, and sums."""
    kinds: dict[str, dict[str, Any]] = {}
    singles: dict[tuple[str, str, Any], dict[str, Any]] = {}
    total = {"kernels": 0, "gbytes": 0.0, "ms": 0.0}
    left = dict(total)
    for part, run in list_kernels(trace):
        kind, ms = find_kind_of(run), gpu.seconds(run) * 1e3
        group = kinds.setdefault(kind, {"kernels": 0, "gbytes": 0.0, "ms": 0.0, "names": {}})
        by_name = group["names"].setdefault(f"{run.name}, {part}", {"kernels": 0, "gbytes": 0.0, "ms": 0.0})
        found = [total, group, by_name]
        if kind not in FUSED:
            layout = "channels last" if run.channels_last else "contiguous"
            key = (run.name, part, (run.shapes, layout, str(run.dtype)))
            about = {
                "name": run.name,
                "part": part,
                "shapes": run.shapes,
                "layout": layout,
                "dtype": str(run.dtype)[6:],
            }
            found += [left, singles.setdefault(key, about | {"kernels": 0, "gbytes": 0.0, "ms": 0.0})]
        for one in found:
            one["kernels"] += 1
            one["gbytes"] += run.bytes_moved / 1e9
            one["ms"] += ms
    dearest = sorted(singles.values(), key=lambda single: -single["ms"])[:20]
    order = dict(sorted(kinds.items(), key=lambda item: -item[1]["ms"]))
    return _round({"total": total, "not_fused": left, "kinds": order, "dearest_not_fused": dearest})


def _round(value: Any) -> Any:
    """Return nested numbers with as many digits as a reader wants."""
    if isinstance(value, dict):
        return {key: _round(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_round(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


def describe(name: str, way: str, found: Mapping[str, Any]) -> str:
    """Return a line about one network."""
    if "refused" in found:
        return f"{name}, {way}: {found['refused']}"
    total, left = found["total"], found["not_fused"]
    kinds = ", ".join(
        f"{kind} {group['kernels']} / {group['ms']:.2f}" for kind, group in found["kinds"].items() if kind not in FUSED
    )
    return (
        f"{name}, {way}: {total['kernels']} kernels, {total['ms']:.2f} ms, {total['gbytes']:.2f} GB; "
        f"not fused {left['kernels']}, {left['ms']:.2f} ms: {kinds}"
    )


if __name__ == "__main__":
    main()
