"""How long convolutions take, one by one, in bf16.

    python workflows/benchmarks/kernel_timings.py random --seconds 60 --result convolutions.json
    python workflows/benchmarks/kernel_timings.py networks --seconds 200 --result convolutions.json
    python workflows/benchmarks/kernel_timings.py table --seconds 200 --result volseg/device/convolution/times_h200.json

``random``: of `RANDOM` random shapes, ``networks``: of all convolutions of the listed networks at 128^3, microseconds
of each direction with channels last, by torch and by each of volseg's kernels and forms that supports it, with its
expanded weights and copies; ``chosen`` names what volseg uses, ``difference`` is relative to the largest value.
``table``: torch's convolutions of all pairs of channels, from which volseg estimates other forms
(``volseg/device/convolution/forms.py``). Nothing is begun after ``--seconds``. ``--device cpu`` tries it without a GPU.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from networks_listed import NETWORKS, build, fit
from results import make_parser, write_result
from torch import Tensor, nn

from volseg.device.convolution import choice, depth_chunks
from volseg.device.convolution.forms import Direction
from volseg.device.convolution.settings import Settings
from volseg.profiling.calibration import time_calls, time_once

DIRECTIONS: tuple[Direction, ...] = ("forward", "input gradient", "weight gradient")

RANDOM = 200

RANDOM_CHANNELS = (3, 6, *range(4, 33, 4), 40, 48, 52, 64, 72, 80, 96, 112, *range(128, 193, 16), 240, 256, 320)

MOST_RANDOM = 2**33
"""Channels in times channels out times voxels."""

EVERY = [1, 2, 3, 4, 5, 6, 7, 10, 14, *range(8, 65, 4), *range(72, 129, 8), *range(144, 257, 16), 320, 384, 512]
SOME = [4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256]
FEW = [4, 8, 12, 16, 24, 32, 48, 64, 96, 128]

KERNELS: Sequence[tuple[tuple[int, ...], tuple[int, ...], list[int]]] = (
    ((3, 3, 3), (1, 1, 1), sorted(EVERY)),
    ((1, 3, 3), (1, 1, 1), SOME),
    ((3, 3, 3), (2, 2, 2), FEW),
    ((3, 3, 3), (2, 2, 1), FEW),
    ((5, 5, 5), (1, 1, 1), FEW),
    ((5, 5, 3), (1, 1, 1), FEW),
)
"""Taps, dilation, and channels. Kernels with 5 taps over pairs have 3, and with a dilation of 2 none along W."""

MOST_PRODUCTS = 256 * 320
"""Channels in times channels out."""

TABLE_SIDE = 96
"""Voxels along each side of the table's volumes."""


class Shape(NamedTuple):
    """A convolution."""

    inputs: int
    outputs: int
    taps: tuple[int, ...]
    sides: tuple[int, ...]
    """Of the input."""
    settings: Settings

    def __str__(self) -> str:
        stride, _, dilation, transposed, _, groups = self.settings.arguments
        told = [f"{self.inputs} to {self.outputs}", " x ".join(map(str, self.taps)), " x ".join(map(str, self.sides))]
        told += [f"stride {stride}"] if max(stride) > 1 else []
        told += [f"dilation {dilation}"] if max(dilation) > 1 else []
        return ", ".join(told + ["transposed"] * transposed + [f"{groups} groups"] * (groups > 1))


def pad(inputs: int, outputs: int, taps: Sequence[int], dilation: int, sides: Sequence[int]) -> Shape:
    """Return a convolution without strides that is padded by its reach."""
    reach = tuple((tap - 1) // 2 * dilation for tap in taps)
    return Shape(
        inputs, outputs, tuple(taps), tuple(sides), Settings((1,) * 3, reach, (dilation,) * 3, False, (0,) * 3, 1)
    )


def main(given: Sequence[str] | None = None) -> None:
    """Measure one part, and write one file."""
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=("random", "networks", "table"))
    parser.add_argument("--seconds", type=float, default=60, help="after which nothing is begun")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args(given)
    begun, rows, left_out = time.monotonic(), [], []
    for name, measure in list_cases(chosen.part, chosen.device):
        if time.monotonic() - begun > chosen.seconds:
            left_out.append(name)
            continue
        rows += (found := measure())
        for row in found:
            print(json.dumps(row)[:1000], flush=True)
    indent = None if chosen.part == "table" else 1
    write_result(chosen.result, indent, took_s=time.monotonic() - begun, left_out=left_out, rows=rows)


Rows = list[dict[str, Any]]


def list_cases(part: str, device: torch.device) -> Iterator[tuple[str, Callable[[], Rows]]]:
    """Yield what is measured of a part: a name, and a call that returns its rows."""
    if part == "table":
        for taps, dilation, channels in KERNELS:
            yield f"{taps}, {dilation}", partial(measure_kernel, taps, dilation, channels, device)
        return
    for shape, calls in ({} if part == "random" else list_shapes()).items():
        yield str(shape), partial(measure_convolution, shape, device, calls)
    for shape in draw_shapes(RANDOM) if part == "random" else ():
        yield str(shape), partial(measure_convolution, shape, device)


def draw_shapes(count: int) -> list[Shape]:
    """Return random shapes: any channels, volumes of 48 to 128 voxels a side, mostly 3 x 3 x 3 taps."""
    draw = random.Random(0)  # noqa: S311  (no secret)
    shapes: list[Shape] = []
    while len(shapes) < count:
        channels = [draw.choice(RANDOM_CHANNELS) for _ in range(2)]
        taps, side = draw.choice([(3,) * 3] * 6 + [(5,) * 3, (1, 3, 3)]), draw.choice((48, 64, 96, 128))
        if channels[0] * channels[1] * side**3 <= MOST_RANDOM:
            shapes.append(pad(*channels, taps, 1 + (draw.random() < 0.1), (side,) * 3))
    return shapes


def list_shapes(names: Sequence[str] = NETWORKS, side: int = 128, *, small: bool = False) -> dict[Shape, Counter[str]]:
    """Return the convolutions of one forward pass of each network, and how often each network has them."""
    found: dict[Shape, Counter[str]] = {}

    def note(name: str, module: Any, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        transposed = isinstance(module, nn.ConvTranspose3d)
        padding = module.padding
        if isinstance(padding, str):  # "same"
            padding = tuple(
                (tap - 1) * step // 2 for tap, step in zip(module.kernel_size, module.dilation, strict=True)
            )
        of = module.stride, padding, module.dilation, transposed, module.output_padding, module.groups
        shape = Shape(module.in_channels, module.out_channels, module.kernel_size, inputs[0].shape[2:], Settings(*of))
        found.setdefault(shape, Counter())[name] += 1

    for name in names:
        sides = fit(name, (side,) * 3)
        net = build(name, sides, small=small).to("meta")
        for module in net.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                module.register_forward_hook(partial(note, name))
        net(torch.empty(1, 1, *sides, device="meta"))
    return found


def measure_convolution(shape: Shape, device: torch.device, calls: Counter[str] | None = None) -> Rows:
    """Return the microseconds of torch and of each other way by direction, how far results are apart, and failures."""
    found: dict[str, Any] = {"name": str(shape), "shape": [*shape[:4], shape.settings.arguments], "calls": calls}
    found |= {"chosen": {}, "us": {}, "difference": {}, "failed": {}}
    call = prepare(shape, device)
    for direction in DIRECTIONS:
        times: dict[str, float] = {}
        apart: dict[str, float] = {}
        found["us"][direction], found["difference"][direction] = times, apart
        chosen, ways = list_ways(direction, call if direction != "forward" else call._replace(gradient=None), call)
        found["chosen"][direction] = chosen
        wanted: Tensor | None = None
        for name, form in ways:
            try:
                value = form().float()
                times[name] = 1e6 * time_form(form, device)
            except RuntimeError as fault:  # cuDNN has no kernel for it, or no memory: the others are measured
                found["failed"][f"{direction}, {name}"] = str(fault).splitlines()[0]
                continue
            wanted = value if wanted is None else wanted
            apart[name] = float((value - wanted).abs().max() / wanted.abs().max())
    return [found]


def measure_kernel(taps: Sequence[int], dilation: Sequence[int], channels: Sequence[int], device: torch.device) -> Rows:
    """Return torch's picoseconds for a voxel by direction, channels in and channels out."""
    dtype, side = torch.bfloat16 if device.type == "cuda" else torch.float32, TABLE_SIDE
    volumes = {count: draw(device, (1, count, side, side, side), dtype) for count in channels}
    padding = [(tap - 1) // 2 * step for tap, step in zip(taps, dilation, strict=True)]
    settings = ([1] * 3, padding, list(dilation), False, [0] * 3, 1)
    found: dict[str, list[list[int | None]]] = {direction: [] for direction in DIRECTIONS}
    for given in channels:
        for square in found.values():
            square.append([])
        for out in channels:
            if given * out > MOST_PRODUCTS:
                for square in found.values():
                    square[-1].append(None)
                continue
            weight = draw(device, (out, given, *taps), dtype)
            inputs = volumes[given], weight, None, *settings
            gradients = volumes[out], *inputs
            runs: dict[str, Callable[[], object]] = {
                "forward": lambda told=inputs: torch.ops.aten.convolution(*told),
                "input gradient": lambda told=gradients: torch.ops.aten.convolution_backward(
                    *told, [True, False, False]
                ),
                "weight gradient": lambda told=gradients: torch.ops.aten.convolution_backward(
                    *told, [False, True, False]
                ),
            }
            for direction, run in runs.items():
                found[direction][-1].append(round(1e12 * time_shortly(run, device) / side**3))
    return [{"taps": taps, "dilation": dilation, "channels": channels, "picoseconds": found}]


def time_shortly(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call: the best of three timings, or one beyond 8 ms."""
    run()
    if device.type == "cpu":
        return time_form(run, device)
    best = time_once(run)
    count = 2 if best > 1e-3 else 4
    again = [time_once(lambda: [run() for _ in range(count)]) / count for _ in range(2 if best < 8e-3 else 0)]
    return min(best, *again)


def prepare(shape: Shape, device: torch.device) -> choice.ConvolutionCall:
    """Draw what is convolved, and the gradient of the output; on a CPU, whose bfloat16 is its own, in float32."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ends = [shape.outputs, shape.inputs // shape.settings.groups]
    if shape.settings.transposed:
        ends = [shape.inputs, shape.outputs // shape.settings.groups]
    slab = draw(device, (1, shape.inputs, *shape.sides), dtype)
    weight = draw(device, (*ends, *shape.taps), dtype)
    out = torch.ops.aten.convolution(slab.to("meta"), weight.to("meta"), None, *shape.settings.arguments)
    return choice.ConvolutionCall(slab, weight, None, shape.settings, draw(device, out.shape, dtype))


def list_ways(
    direction: Direction, call: choice.ConvolutionCall, whole: choice.ConvolutionCall
) -> tuple[str | None, list[tuple[str, Callable[[], Tensor]]]]:
    """Return what volseg chooses, and torch's way with each of volseg's that supports the convolution."""
    ways: list[tuple[str, Callable[[], Tensor]]] = [("torch", partial(compute, whole, DIRECTIONS.index(direction)))]
    ways += [(one.name, partial(one.compute, call)) for one in choice.TABLES[direction] if one.suits(call)]
    ways += [
        (str(form), partial(choice.compute_in_form, form, direction, call))
        for form in choice._list_forms(direction, call)
        if choice._can_take(form, direction, call)
    ]
    chosen = choice.choose(direction, call)
    return None if chosen is None else chosen.name, ways


def compute(call: choice.ConvolutionCall, place: int) -> Tensor:
    """Return the output, the input's gradient or the weight's by torch."""
    slab, weight, _, settings, gradient = call
    assert gradient is not None
    if place == 0:
        return depth_chunks.convolve(slab, weight, None, settings.arguments)
    mask = [place == 1, place == 2, False]
    found = depth_chunks.differentiate(gradient, slab, weight, None, settings.arguments, mask)[place - 1]
    assert found is not None
    return found


def draw(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return noise with channels last: zeros would let matrix units run at a higher clock."""
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=torch.channels_last_3d).normal_()


def time_form(form: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of what has run before, recorded; on a CPU once."""
    if device.type == "cuda":
        with torch.cuda.stream(stream := torch.cuda.Stream(device)):
            return time_calls(form, stream)
    begin = time.perf_counter()
    form()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
