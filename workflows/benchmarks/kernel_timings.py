"""How long kernels take, one by one, in bf16: convolutions in every form, the norms' reductions, attention.

    python workflows/benchmarks/kernel_timings.py convolutions --seconds 36 --result convolutions.json
    python workflows/benchmarks/kernel_timings.py norms --result norms.json
    python workflows/benchmarks/kernel_timings.py attention --result attention.json

``convolutions``: per shape and direction, with channels last: torch's own; over pairs and fours of voxels (``paired``);
with channels of zeros up to a multiple of 32 in front, behind, or both (``padded``); forward and the input's gradient
as one another, with the weight turned round (``turned``); and what ``volseg`` chooses where pairs and turned weights
are switched off. Microseconds include expanded weights and copies; ``difference`` is to torch's result, relative to the
largest value. ``norms``: statistics and sums of the gradient, and the bytes that they read in GB/s. ``attention``:
milliseconds of our passes and of torch's. Behind ``--seconds`` nothing is begun. ``--device cpu`` tries it without a
GPU (norms with ``TRITON_INTERPRET=1``).
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
import torch.nn.functional as F
from torch import Tensor

from volseg.device import attention, fusions
from volseg.device.attention import Addend
from volseg.device.convolution import choice, depth_chunks, padded, rules, space_to_channels
from volseg.device.convolution.forms import Direction, Groups, Turned, ZeroChannels
from volseg.device.convolution.settings import Settings
from volseg.device.norm import addition_passes, passes, statistics
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.device.norm.term import Term
from volseg.monitoring.environment import environment

DIRECTIONS: tuple[Direction, ...] = ("forward", "input gradient", "weight gradient")

HOPELESS = 3.0
"""A form that takes so many times torch's is timed once, and not recorded."""

MOST_CHANNELS = 256
"""Of a group: wider ones were slower wherever they were measured."""

NORMS = ((16, 128), (32, 128), (64, 128), (80, 128), (64, 64), (128, 32))
"""Channels, and voxels along each side."""

BYTES = 800_000_000
"""That are gone through before a volume is read again; more than any cache holds."""

ATTENTION = {
    "UNETR 128^3": (12, 512, 512, 64, 0, 1),
    "UNETR 160 x 320 x 320": (12, 4000, 4000, 64, 0, 1),
    "UNETR 160 x 320 x 320, of two": (12, 4000, 8000, 64, 0, 1),
    "SwinUNETR 128^3, first level": (3, 343, 343, 16, 2, 1000),
}
"""Heads, queries, keys, features, terms, and windows."""


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
    *list_cubes(5, 1, (256, 256, 32), (256, 256, 16), (1, 16, 128), (16, 3, 128), (32, 3, 128)),
    Shape(32, 3, 5, 1, 64, samples=32),
    Shape(1, 16, 5, 1, 64, samples=32),
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
    """Measure one part, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("convolutions", "norms", "attention"))
    parser.add_argument("--seconds", type=float, default=60, help="after which nothing is begun")
    parser.add_argument("--shapes", type=Path, help="JSON list of shapes, as a result has them, instead")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args(given)
    begun, rows, left_out = time.monotonic(), [], []
    for name, measure in list_cases(chosen.part, chosen.shapes, chosen.device):
        if time.monotonic() - begun > chosen.seconds:
            left_out.append(name)
            continue
        rows += (found := measure())
        for row in found:
            print(json.dumps(row), flush=True)
    result = {
        "command": shlex.join(["python", *(sys.argv if given is None else given)]),
        "environment": environment(),
        "took_s": time.monotonic() - begun,
        "left_out": left_out,
        "rows": rows,
    }
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


Rows = list[dict[str, Any]]


def list_cases(part: str, shapes: Path | None, device: torch.device) -> Iterator[tuple[str, Callable[[], Rows]]]:
    """Yield what is measured of a part: a name, and a call that returns its rows."""
    if part == "convolutions":
        for shape in read_shapes(shapes) if shapes else SHAPES:
            yield str(shape), partial(measure_convolution, shape, device)
    elif part == "norms":
        wanted = json.loads(shapes.read_text(encoding="utf-8")) if shapes else NORMS
        for channels, side in wanted:
            yield f"{channels} channels, {side}^3", partial(measure_norm, channels, side, device)
    else:
        for name in ATTENTION:
            yield name, partial(measure_attention, name, device)


def read_shapes(path: Path) -> list[Shape]:
    """Return the shapes of a JSON list."""
    read: list[list[Any]] = json.loads(path.read_text(encoding="utf-8"))
    rows: list[list[Any]] = [[tuple(one) if isinstance(one, list) else one for one in row] for row in read]
    return [Shape(*row) for row in rows]


def measure_convolution(shape: Shape, device: torch.device) -> Rows:
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
    return [found]


def prepare(shape: Shape, device: torch.device) -> rules.ConvolutionCall:
    """Draw what is convolved, and the gradient of the output; on a CPU, whose bfloat16 is its own, in float32."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sides = (shape.sides,) * 3 if isinstance(shape.sides, int) else shape.sides
    reach = tuple((taps - 1) // 2 * shape.dilation for taps in shape.taps)
    around, padding = (reach[0], (0, *reach[1:])) if shape.halo else (0, reach)
    settings = Settings((1,) * 3, padding, (shape.dilation,) * 3, False, (0,) * 3, 1)
    slab = draw(device, (shape.samples, shape.inputs, sides[0] + 2 * around, *sides[1:]), dtype)
    weight = draw(device, (shape.outputs, shape.inputs, *shape.taps), dtype)
    gradient = draw(device, (shape.samples, shape.outputs, *sides), dtype)
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
        if fits and all(space_to_channels.can_group(volume, weight, settings, voxels) for volume in (slab, gradient)):
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
        return depth_chunks.convolve(slab, weight, None, settings.arguments)
    mask = [place == 1, place == 2, False]
    found = depth_chunks.differentiate(gradient, slab, weight, None, settings.arguments, mask)[place - 1]
    assert found is not None
    return found


def draw(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return noise with channels last: zeros would let matrix units run at a higher clock."""
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=torch.channels_last_3d).normal_()


def time_form(form: Callable[[], object], device: torch.device, hopeless: float | None) -> float:
    """Return the seconds of a form that has run, recorded where it is not hopeless; on a CPU once."""
    if device.type == "cpu":
        begin = time.perf_counter()
        form()
        return time.perf_counter() - begin
    once = min(time_call(form) for _ in range(2))
    if hopeless is not None and once > max(hopeless, 1e-3):  # below, it is the host that takes so long
        return once
    count = max(1, min(100, int(0.002 / once)))
    torch.cuda.synchronize()
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        for _ in range(count):
            form()
    recording.replay()
    return min(time_call(recording.replay) for _ in range(5)) / count


def time_call(call: Callable[[], object]) -> float:
    """Return the device's seconds for a call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure_norm(channels: int, side: int, device: torch.device) -> Rows:
    """Return microseconds and GB/s of the reductions of a norm with leaky ReLU."""
    elements = channels * side**3
    copies = 3 if device.type == "cpu" else max(4, min(64, BYTES // (2 * elements)))
    volumes = [draw(device, (1, channels, side, side, side), torch.bfloat16) for _ in range(copies)]
    pairs, activation = [torch.rand(1, channels, device=device) for _ in range(3)], Activation("leaky", 0.01)
    kernels: list[tuple[str, int, Callable[..., object], list[tuple[Any, ...]]]] = [
        ("moments", 1, statistics.compute_moments_of_parts, [(x,) for x in volumes]),
        ("sums", 2, passes.gradient_sums, [(g, x, *pairs, activation, None) for g, x in take(volumes, 2)]),
        (
            "sums of two norms",
            3,
            addition_passes.add_sums,
            [(g, Term(x, *pairs, activation, None), Term(y, *pairs), IDENTITY) for g, x, y in take(volumes, 3)],
        ),
    ]
    rows = []
    for name, reads, call, sets in kernels:
        place = iter(range(10**9))

        def run(call: Callable[..., object] = call, sets: list[Any] = sets, place: Iterator[int] = place) -> object:
            return call(*sets[next(place) % len(sets)])

        run()
        us = 1e6 * time_form(run, device, None)
        gigabytes = reads * 2 * elements / us / 1e3
        rows.append({"kernel": name, "channels": channels, "side": side, "us": us, "GB_per_s": gigabytes})
    return rows


def take(volumes: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """Return so many of the volumes at a time, each as long as possible after it was read last."""
    step = len(volumes) // count
    return [tuple(volumes[(i + j * step) % len(volumes)] for j in range(count)) for i in range(len(volumes))]


def measure_attention(name: str, device: torch.device) -> Rows:
    """Return milliseconds of attention and its gradients, by ours and, without terms, by torch."""
    heads, queries, keys, features, terms, windows = ATTENTION[name]

    def project(tokens: int) -> Tensor:
        return torch.randn(windows, tokens, heads, features, device=device, dtype=torch.bfloat16).transpose(1, 2)

    bias = torch.randn(heads, queries, keys, device=device)
    mask = torch.zeros(windows, queries, keys, device=device)
    added = [Addend(bias, 1, heads), Addend(mask, heads, windows)][:terms]
    query, key, value, scale = project(queries), project(keys), project(keys), features**-0.5
    out, logs = attention.attend(query, key, value, added, scale)
    gradient = torch.randn_like(out)
    given = gradient, query, key, value, out, logs, added, scale, [False] * terms
    forms: dict[str, Callable[[], object]] = {
        "ours, forward": lambda: attention.attend(query, key, value, added, scale),
        "ours, backward": lambda: attention.differentiate(*given),
    }
    if not terms:
        forms["torch, forward"] = lambda: F.scaled_dot_product_attention(query, key, value)
    ms = {form: 1e3 * time_form(run, device, None) for form, run in forms.items()}
    teraflops = 4e-9 * windows * heads * queries * keys * features / ms["ours, forward"]
    return [{"name": name, "ms": ms, "teraflops_forward": teraflops}]


if __name__ == "__main__":
    main()
