"""How long a convolution takes in each form that it may be computed in: what the rules of choice are read from.

    python workflows/benchmarks/convolution_forms.py --seconds 36 --result convolution_forms.json

Per shape and direction (``forward``, ``input gradient``, ``weight gradient``), in bf16 with channels last: torch's own;
over pairs and fours of voxels (``volseg.device.convolution.paired``); with channels filled up to a multiple of 32 in
front of the convolution, behind it, or both (``padded``); forward and the input's gradient as one another, with the
weight turned round (``turned``), plainly and over groups; and what ``volseg`` chooses where pairs and turned weights
are switched off. Microseconds of everything that a form takes, expanded weights and copies included, in a recording;
and how far its result is from torch's, relative to the largest value. Shapes that networks have and that no rule knows
come first; behind ``--seconds`` none is begun.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rate_cases import draw
from torch import Tensor

from volseg.device import fusions
from volseg.device.convolution import choice, padded, paired, rules, stacks
from volseg.device.convolution.forms import Direction, Groups, Turned, ZeroChannels
from volseg.device.convolution.settings import Settings
from volseg.estimate.calibration import time_calls, time_once
from volseg.monitoring.environment import environment

DIRECTIONS: tuple[Direction, ...] = ("forward", "input gradient", "weight gradient")

HOPELESS = 3.0
"""A form that takes so many times torch's is timed once, and not recorded."""

MOST_CHANNELS = 256
"""Of a group: wider ones were slower wherever they were measured."""


class Shape(NamedTuple):
    """A convolution that is padded by its reach, but where planes of a halo lie around the volume."""

    inputs: int
    outputs: int
    kernel: int | tuple[int, int, int]
    dilation: int
    sides: int | tuple[int, int, int]
    """Of the output."""
    halo: bool = False
    samples: int = 1

    @property
    def taps(self) -> tuple[int, int, int]:
        """The kernel's sides."""
        return (self.kernel,) * 3 if isinstance(self.kernel, int) else self.kernel

    def __str__(self) -> str:
        kernel, sides = (
            f"{sides}^3" if isinstance(sides, int) else " x ".join(map(str, sides))
            for sides in (self.kernel, self.sides)
        )
        dilated = f", dilation {self.dilation}" if self.dilation > 1 else ""
        many = f", {self.samples} samples" if self.samples > 1 else ""
        return f"{self.inputs} to {self.outputs}, {kernel}{dilated}, {sides}{', halo' * self.halo}{many}"


def list_cubes(kernel: int, dilation: int, *rows: tuple[int, int, int]) -> list[Shape]:
    """List shapes by channels in, channels out and side."""
    return [Shape(inputs, outputs, kernel, dilation, side) for inputs, outputs, side in rows]


SHAPES = [
    # SwinUNETR of 48 features.
    *list_cubes(3, 1, (48, 48, 128), (96, 48, 128), (48, 48, 64), (96, 48, 64), (48, 96, 64), (96, 96, 32)),
    *list_cubes(3, 1, (192, 96, 32), (96, 96, 64), (192, 192, 16), (384, 192, 16)),
    # Other channels that are no multiple of 32, and few.
    *list_cubes(3, 1, (24, 24, 128), (24, 24, 64), (40, 40, 64), (80, 80, 32), (160, 160, 16), (12, 12, 128)),
    # DynUNet, BasicUNet, SegResNet and their like.
    *list_cubes(3, 1, (32, 32, 128), (64, 32, 128), (64, 32, 64), (32, 32, 64), (16, 16, 128), (16, 16, 64)),
    *list_cubes(3, 1, (8, 8, 128), (8, 8, 64), (16, 8, 128), (32, 16, 128), (48, 16, 128), (96, 32, 128)),
    *list_cubes(3, 1, (32, 64, 64), (64, 64, 128), (64, 64, 64), (128, 64, 64), (32, 32, 32), (16, 16, 32)),
    # HighResNet.
    *list_cubes(3, 2, (16, 32, 128), (32, 32, 128), (32, 32, 64)),
    *list_cubes(3, 4, (32, 64, 128), (64, 64, 128), (32, 64, 64)),
    *list_cubes(1, 1, (64, 80, 128), (80, 80, 128)),
    # V-Net.
    *list_cubes(5, 1, (16, 16, 128), (32, 32, 128), (32, 32, 64), (64, 64, 64), (64, 64, 32), (128, 128, 32)),
    # Slabs, and volumes that are no cubes.
    Shape(32, 32, 3, 1, (64, 128, 128), halo=True),
    Shape(16, 16, 3, 1, (64, 128, 128), halo=True),
    Shape(32, 32, 3, 1, (160, 320, 320)),
    Shape(32, 32, (1, 3, 3), 1, (32, 256, 256)),
    Shape(32, 32, (3, 3, 1), 1, 128),
    Shape(16, 16, (1, 3, 3), 1, (32, 256, 256)),
    *list_cubes(3, 1, (128, 128, 64), (128, 128, 32), (256, 128, 32), (256, 256, 32)),
]


def main(given: Sequence[str] | None = None) -> None:
    """Measure all shapes, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=36, help="after which no shape is begun")
    parser.add_argument("--shapes", type=Path, help="JSON list of shapes as a result has them, instead")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args(given)
    begun, rows, left_out = time.monotonic(), [], []
    for shape in read_shapes(chosen.shapes) if chosen.shapes else SHAPES:
        if time.monotonic() - begun > chosen.seconds:
            left_out.append(str(shape))
            continue
        rows.append(measure(shape, chosen.device))
        tell(rows[-1])
    result = {
        "command": shlex.join(["python", *(sys.argv if given is None else given)]),
        "environment": environment(),
        "unit": "us, differences relative to the largest value",
        "took_s": time.monotonic() - begun,
        "left_out": left_out,
        "rows": rows,
    }
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} shapes in {result['took_s']:.0f} s; left out: {', '.join(left_out) or 'none'}")


def read_shapes(path: Path) -> list[Shape]:
    """Return the shapes of a JSON list."""
    read: list[list[Any]] = json.loads(path.read_text(encoding="utf-8"))
    rows: list[list[Any]] = [[tuple(one) if isinstance(one, list) else one for one in row] for row in read]
    return [Shape(*row) for row in rows]


def measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Return the microseconds of each form by direction, how far results are apart, and which forms failed."""
    found: dict[str, Any] = {"name": str(shape), "shape": shape, "us": {}, "difference": {}, "failed": {}}
    call = prepare(shape, device)
    for direction in DIRECTIONS:
        times: dict[str, float] = {}
        apart: dict[str, float] = {}
        found["us"][direction], found["difference"][direction] = times, apart
        wanted: Tensor | None = None
        for name, form in list_forms(direction, call):
            try:
                value = form().float()
                times[name] = 1e6 * time_form(form, device, HOPELESS * times["torch"] / 1e6 if times else None)
            except RuntimeError as fault:  # cuDNN has no kernel for it, or no memory: the others are measured
                found["failed"][f"{direction}, {name}"] = str(fault).splitlines()[0]
                continue
            wanted = value if wanted is None else wanted
            apart[name] = float((value - wanted).abs().max() / wanted.abs().max())
    return found


def prepare(shape: Shape, device: torch.device) -> rules.ConvolutionCall:
    """Draw what is convolved, and the gradient of the output; on a CPU, whose bfloat16 is its own, in float32."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sides = (shape.sides,) * 3 if isinstance(shape.sides, int) else shape.sides
    reach = tuple((taps - 1) // 2 * shape.dilation for taps in shape.taps)
    around, padding = (reach[0], (0, *reach[1:])) if shape.halo else (0, reach)
    settings = Settings((1,) * 3, padding, (shape.dilation,) * 3, False, (0,) * 3, 1)
    slab = draw(device, (shape.samples, shape.inputs, sides[0] + 2 * around, *sides[1:]), dtype, True)
    weight = draw(device, (shape.outputs, shape.inputs, *shape.taps), dtype, True)
    gradient = draw(device, (shape.samples, shape.outputs, *sides), dtype, True)
    return rules.ConvolutionCall(slab, weight, None, settings, gradient)


def list_forms(direction: Direction, call: rules.ConvolutionCall) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the forms of a direction, torch's first."""
    slab, weight, _, settings, gradient = call
    assert gradient is not None
    given = call if direction != "forward" else call._replace(gradient=None)
    yield "torch", partial(compute, call, DIRECTIONS.index(direction))
    taps = weight.shape[2:]
    turns = direction != "weight gradient" and taps.numel() > 1 and rules.pads_less_than_kernel(weight, settings)
    if turns:
        yield "turned round", partial(choice.compute_in_form, Turned(), direction, given)
    for name, voxels in (("pairs", 2), ("fours", 4)):
        fits = voxels * max(weight.shape[:2]) <= MOST_CHANNELS and taps.numel() > 1
        if fits and all(paired.can_group(volume, weight, settings, voxels) for volume in (slab, gradient)):
            yield name, partial(choice.compute_in_form, Groups(voxels), direction, given)
            if turns:
                yield f"{name}, turned round", partial(choice.compute_in_form, Turned(voxels), direction, given)
    odd = [channels != padded.fill_up(channels) for channels in (weight.shape[1], weight.shape[0])]
    for name, inputs, outputs in (("padded in", 1, 0), ("padded out", 0, 1), ("padded both", 1, 1)):
        if (odd[0] or not inputs) and (odd[1] or not outputs):
            form = ZeroChannels(bool(inputs), bool(outputs))
            yield name, partial(choice.compute_in_form, form, direction, given)
    with fusions.without("pairs", "turned weights"):
        chosen = choice.choose(direction, given)
    if chosen is not None:
        yield chosen.name, chosen.compute


def compute(call: rules.ConvolutionCall, place: int) -> Tensor:
    """Return the output, the input's gradient or the weight's by torch."""
    slab, weight, _, settings, gradient = call
    assert gradient is not None
    if place == 0:
        return stacks.convolve(slab, weight, None, settings.arguments)
    mask = [place == 1, place == 2, False]
    found = stacks.differentiate(gradient, slab, weight, None, settings.arguments, mask)[place - 1]
    assert found is not None
    return found


def time_form(form: Callable[[], object], device: torch.device, hopeless: float | None) -> float:
    """Return the seconds of a form that has run, recorded where it is not hopeless; on a CPU once."""
    if device.type == "cpu":
        begin = time.perf_counter()
        form()
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    once = min(time_once(form) for _ in range(2))
    if hopeless is not None and once > max(hopeless, 1e-3):  # below, it is the host that takes so long
        return once
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = time_calls(form, stream)
    torch.cuda.current_stream().wait_stream(stream)
    return found


def tell(row: dict[str, Any]) -> None:
    """Print a shape's times, and what failed."""
    print(row["name"])
    for direction, times in row["us"].items():
        best = min(times, key=times.__getitem__, default="")
        print(f"  {direction:15}", *(f"{name}{'*' * (name == best)} {value:.0f}" for name, value in times.items()))
    for name, why in row["failed"].items():
        print(f"  failed: {name}: {why}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
