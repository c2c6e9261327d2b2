"""Convolutions of 5 x 5 x 5 voxels from 32 channels on: cuDNN's choices beside ``volseg``'s.

    python workflows/benchmarks/wide_convolution.py --output results.json

TFLOP/s in bf16 with channels last, the best of several calls: forward, the input's gradient and the weights' by cuDNN,
with and without its trials (``cudnn.benchmark``), and forward and the weights' gradient as ``volseg`` computes them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from volseg.device.convolution import choice
from volseg.device.convolution.settings import Settings

CASES = [
    (1, 128, (32, 32, 32)),
    (1, 128, (16, 64, 64)),
    (1, 128, (16, 16, 16)),
    (1, 256, (32, 32, 32)),
    (1, 256, (16, 16, 16)),
    (1, 256, (8, 32, 32)),
    (1, 256, (8, 8, 8)),
    *((count, 128, (side,) * 3) for count, side in ((8, 8), (8, 16), (32, 8), (32, 16))),
    *((count, 256, (side,) * 3) for count, side in ((8, 4), (8, 8), (32, 4), (32, 8))),
    *((count, 64, (side,) * 3) for count, side in ((1, 32), (1, 64), (8, 16), (8, 32), (32, 16), (32, 32))),
    *((count, 32, (side,) * 3) for count, side in ((1, 32), (1, 64), (1, 128), (8, 32), (8, 64), (32, 32), (32, 64))),
]
"""Samples, channels and sides."""

SETTINGS = Settings((1,) * 3, (2,) * 3, (1,) * 3, False, (0,) * 3, 1)
ARGUMENTS = SETTINGS.arguments


def best(call: Callable[[], object], repeats: int = 6) -> float:
    """Return the shortest time of a call, ms."""
    times = []
    for number in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end))
    return min(times)


def half(*shape: int) -> Tensor:
    """Return random values in bfloat16 with channels last."""
    return torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last_3d)


def measure(count: int, channels: int, sides: tuple[int, int, int]) -> dict[str, float]:
    """Return TFLOP/s of each way, and how far ours are from cuDNN's results, relative to the largest."""
    x, gradient, weight = (
        half(count, channels, *sides),
        half(count, channels, *sides),
        half(channels, channels, 5, 5, 5),
    )

    def forward() -> Tensor:
        return torch.ops.aten.convolution(x, weight, None, *ARGUMENTS)

    def backward(of_input: bool) -> Tensor:
        mask = [of_input, not of_input, False]
        found = torch.ops.aten.convolution_backward(gradient, x, weight, None, *ARGUMENTS, mask)
        return found[0 if of_input else 1]

    def own_forward() -> Tensor:
        return choice.convolve(x, weight, None, SETTINGS, channels_last=True)

    def own_weight() -> Tensor:
        found = choice.differentiate(gradient, x, weight, None, SETTINGS, True, [False, True, False])[1]
        assert found is not None
        return found

    work = 2 * 125 * channels**2 * count * prod(sides) / 1e9
    found = {}
    for trials in (False, True):
        torch.backends.cudnn.benchmark = trials
        name = "cudnn benchmark" if trials else "cudnn"
        found[f"{name}: forward"] = work / best(forward)
        found[f"{name}: input gradient"] = work / best(lambda: backward(True))
        found[f"{name}: weight gradient"] = work / best(lambda: backward(False))
    torch.backends.cudnn.benchmark = False
    found["volseg: forward"] = work / best(own_forward)
    found["volseg: weight gradient"] = work / best(own_weight)
    for name, one, other in (("forward", own_forward(), forward()), ("weight", own_weight(), backward(False))):
        found[f"{name}: largest difference"] = float((one - other).float().abs().max() / other.float().abs().max())
    return found


def main() -> None:
    """Measure all cases and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/wide_convolution.json"))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "command": " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
        "unit": "TFLOP/s, differences relative to the largest value",
        "rows": [{"samples": case[0], "channels": case[1], "sides": case[2], **measure(*case)} for case in CASES],
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for row in report["rows"]:
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})


if __name__ == "__main__":
    main()
