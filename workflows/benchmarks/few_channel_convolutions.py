"""A V-Net's first and last convolutions: torch's beside ours, by tile.

    python workflows/benchmarks/few_channel_convolutions.py --result few_channels.json

Milliseconds in bfloat16 with channels last, the best of several calls: the last convolution forward and its gradients,
by torch and by kernels of ours, and the first one's by both kernels of ours. ``--tiles`` adds every tile of the kernels
for the first case of each.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from wide_convolution import best, half

from volseg.device.convolution import few_in, few_out, few_taps
from volseg.monitoring.environment import environment

LAST = [
    ((32, 32, 64, 64, 64), 3, 5),
    ((1, 32, 128, 128, 128), 3, 5),
    ((1, 32, 160, 320, 320), 3, 5),
    ((1, 32, 128, 128, 128), 2, 5),
    ((1, 32, 128, 128, 128), 6, 5),
    ((1, 32, 128, 128, 128), 3, 3),
    ((1, 32, 128, 128, 128), 10, 3),
    ((1, 16, 128, 128, 128), 3, 5),
    ((1, 64, 64, 64, 64), 4, 5),
    ((8, 32, 32, 48, 32), 3, 5),
]
"""Volume in, channels out, side of the kernel."""

FIRST = [
    ((32, 1, 64, 64, 64), 16, 5),
    ((1, 1, 128, 128, 128), 16, 5),
    ((1, 2, 128, 128, 128), 32, 5),
    ((1, 1, 128, 128, 128), 32, 3),
    ((1, 2, 128, 128, 128), 32, 3),
    ((1, 4, 128, 128, 128), 32, 3),
]

OUT_TILES = [
    {"VOXELS": voxels, "WARPS": warps, "STAGES": stages, "PROGRAMS": programs}
    for voxels, warps, stages, programs in (
        (64, 4, 4, 8), (128, 4, 1, 4), (128, 4, 2, 6), (128, 4, 3, 6), (128, 4, 3, 8), (128, 4, 4, 4), (128, 4, 4, 5),
        (128, 4, 4, 6), (128, 4, 5, 5), (256, 8, 3, 2), (256, 8, 3, 3), (256, 8, 4, 2),
    )
]  # fmt: skip
IN_TILES = [
    {"VOXELS": voxels, "WARPS": warps, "MOST_COLUMNS": columns}
    for voxels, warps, columns in ((128, 4, 16), (128, 4, 32), (128, 4, 64), (256, 4, 16), (256, 4, 32), (256, 8, 32))
]
WEIGHT_TILES = [
    {"WEIGHT_VOXELS": voxels, "WEIGHT_WARPS": warps, "MOST_WEIGHT_COLUMNS": columns}
    for columns in (32, 64, 128)
    for voxels, warps in ((32, 4), (64, 4), (128, 4), (64, 8), (128, 8), (256, 8))
]


@contextmanager
def tiled(module: Any, **numbers: int) -> Iterator[None]:
    """Let kernels have another tile in here."""
    before = {name: getattr(module, name) for name in numbers}
    for name, number in numbers.items():
        setattr(module, name, number)
    try:
        yield
    finally:
        for name, number in before.items():
            setattr(module, name, number)


def by_tile(module: Any, tiles: Sequence[dict[str, int]], call: Callable[[], object]) -> dict[str, float]:
    """Return milliseconds of a call by tile."""
    found = {}
    for tile in tiles:
        with tiled(module, **tile):
            found[" ".join(f"{name} {number}" for name, number in tile.items())] = best(call)
    return found


def measure_last(shape: tuple[int, ...], channels: int, side: int, tiles: bool) -> dict[str, Any]:
    """Return milliseconds of a convolution to few channels."""
    padding = (side // 2,) * 3
    arguments = [[1] * 3, list(padding), [1] * 3, False, [0] * 3, 1]
    x, weight = half(*shape), half(channels, shape[1], side, side, side) / 10
    gradient = half(shape[0], channels, *shape[2:])

    def by_torch(of_input: bool) -> Tensor:
        mask = [of_input, not of_input, False]
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *arguments, mask)[int(not of_input)]

    torchs = {
        "forward": lambda: torch.ops.aten.convolution(x, weight, None, *arguments),
        "input gradient": lambda: by_torch(of_input=True),
        "weight gradient": lambda: by_torch(of_input=False),
    }
    ours = {
        "forward": lambda: few_out.forward(x, weight, None, padding),
        "input gradient": lambda: few_out.input_gradient(gradient, weight, padding),
        "weight gradient": lambda: few_out.weight_gradient(gradient, x, weight, padding),
    }
    told: dict[str, Any] = {
        "shape": shape,
        "channels": channels,
        "kernel": side,
        "torch": {name: best(call) for name, call in torchs.items()},
        "ours": {name: best(call) for name, call in ours.items()},
        "largest difference": {name: compare(ours[name](), torchs[name]()) for name in ours},
    }
    if tiles:
        told["forward by tile"] = by_tile(few_out, OUT_TILES, ours["forward"])
        told["input gradient by tile"] = by_tile(few_in, IN_TILES, ours["input gradient"])
        told["weight gradient by tile"] = by_tile(few_in, WEIGHT_TILES, ours["weight gradient"])
    return told


def measure_first(shape: tuple[int, ...], channels: int, side: int, tiles: bool) -> dict[str, Any]:
    """Return milliseconds of a convolution of few channels to many."""
    padding = (side // 2,) * 3
    x, weight = half(*shape), half(channels, shape[1], side, side, side) / 5
    gradient = half(shape[0], channels, *shape[2:])
    told: dict[str, Any] = {"shape": shape, "channels": channels, "kernel": side}

    def forward() -> Tensor:
        return few_in.forward(x, weight, None, padding)

    def weight_gradient() -> Tensor:
        return few_in.weight_gradient(gradient, x, weight, padding)

    told["taps in lines"] = {"forward": best(forward), "weight gradient": best(weight_gradient)}
    if shape[1] * side**3 <= few_taps.MOST_TAPS:
        told["taps one by one"] = {
            "forward": best(lambda: few_taps.forward(x, weight, padding)),
            "weight gradient": best(lambda: few_taps.weight_gradient(gradient, x, weight, padding)),
        }
        told["largest difference"] = {
            "forward": compare(forward(), few_taps.forward(x, weight, padding)),
            "weight gradient": compare(weight_gradient(), few_taps.weight_gradient(gradient, x, weight, padding)),
        }
    if tiles:
        told["forward by tile"] = by_tile(few_in, IN_TILES, forward)
        told["weight gradient by tile"] = by_tile(few_in, WEIGHT_TILES, weight_gradient)
    return told


def compare(ours: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((ours - other).float().abs().max() / other.float().abs().max())


def main() -> None:
    """Measure all cases and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true")
    chosen = parser.parse_args()
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "unit": "milliseconds; differences relative to the largest value",
        "environment": environment(),
        "first": [],
        "last": [],
    }
    torch.manual_seed(0)
    for number, case in enumerate(FIRST):
        report["first"].append(measure_first(*case, tiles=chosen.tiles and number == 0))
        print(json.dumps(report["first"][-1]), flush=True)
    for number, case in enumerate(LAST):
        report["last"].append(measure_last(*case, tiles=chosen.tiles and number == 0))
        print(json.dumps(report["last"][-1]), flush=True)
        chosen.result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    chosen.result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
