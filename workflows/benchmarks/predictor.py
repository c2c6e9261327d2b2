"""`volseg.Predictor` against MONAI's `SlidingWindowInferer` on the same plain networks, from a volume to labels.

    python workflows/benchmarks/predictor.py --result workflows/benchmarks/results/networks_h200_predictor.json

A random volume (512 x 512 x 300) on the CPU becomes a label map there: windows of 128^3, half overlapping, blended by a
Gaussian, bfloat16. ``monai`` takes two windows per pass and the argmax on the GPU, ``volseg`` is the predictor as its
defaults are, ``plain`` the predictor with the network as it is. Seconds are medians in turns after a first call, which
is given too. ``equal`` is the share of voxels with MONAI's label; the networks are random, so near ties are many.
``--device cpu`` tries it with small networks.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.data import MetaTensor
from monai.inferers import SlidingWindowInferer
from networks_listed import CLASSES, NETWORKS, build
from results import make_parser, write_result
from torch import Tensor, nn

from volseg import Predictor

TURNS = 5


def main() -> None:
    """Measure networks one after another; write the result after each."""
    parser = make_parser(__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["DynUNet", "VNet", "UNet", "SegResNet"])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in chosen.networks:
        rows.append(measure(name, chosen.device))
        print(json.dumps(rows[-1]), flush=True)
        write_result(chosen.result, rows=rows)


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """Return the row of a network."""
    small = device.type == "cpu"
    sides, window = ((48, 48, 40), (32,) * 3) if small else ((512, 512, 300), (128,) * 3)
    network = build(name, window, small=small).to(device).eval()
    volume = torch.randn(1, *sides, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"num_classes": CLASSES, "window": window, "autocast": torch.bfloat16}
    predictors = {kind: Predictor(model=network, fast=kind == "volseg", **settings) for kind in ("volseg", "plain")}
    ways: dict[str, Callable[[], Tensor]] = {"monai": partial(predict_by_monai, network, volume, device, window)}
    ways |= {kind: partial(predictor, {"image": MetaTensor(volume)}) for kind, predictor in predictors.items()}
    first = {kind: time_call(way, device) for kind, way in ways.items()}
    turns = [{kind: time_call(way, device)[0] for kind, way in ways.items()} for _ in range(1 if small else TURNS)]
    seconds = {kind: statistics.median(turn[kind] for turn in turns) for kind in ways}
    expected = first["monai"][1]
    return {
        "network": name,
        "seconds": seconds,
        "first_seconds": {kind: taken for kind, (taken, _) in first.items()},
        "faster_than_monai": seconds["monai"] / seconds["volseg"],
        "equal": {kind: float((first[kind][1].reshape(sides) == expected).double().mean()) for kind in predictors},
    }


def predict_by_monai(network: nn.Module, volume: Tensor, device: torch.device, window: tuple[int, ...]) -> Tensor:
    """Return the label map (D, H, W) of MONAI's inferer."""
    inferer = SlidingWindowInferer(window, sw_batch_size=2, overlap=0.5, mode="gaussian")
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        return inferer(volume[None].to(device), network)[0].argmax(0).to(torch.uint8).cpu()


def time_call(way: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """Return the seconds of a call, and its result."""
    begin = time.monotonic()
    labels = torch.as_tensor(way())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - begin, labels


if __name__ == "__main__":
    main()
