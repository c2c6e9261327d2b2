"""Measure the pipeline beside its peers: speed against its own bound, memory per GPU, a timeline.

    python workflows/benchmarks/pipeline.py --output results.json            # everything, on all visible GPUs
    python workflows/benchmarks/pipeline.py --output results.json --parts check blocks
    python workflows/benchmarks/pipeline.py --output results.json --plot figure.svg --no-run

Rows run one after another in a worker process that is replaced when a row fails badly or outlasts its limit;
the JSON is rewritten after every row. A row is forward, loss, backward and optimizer step in fp32 with TF32,
the median of ten after warming up.

Ours and its peers see the same batches. eisen-core's wrapper (0.0.9, measured if installed) computes less: it
drops the skips. A pipeline's bound is what its slowest stage and its fill allow: (m + p - 1) x slowest stage,
as the partition measured it.

References
----------
.. [1] PyTorch's tutorial "Single-Machine Model Parallel Best Practices": ResNet50 split over two GPUs, then
pipelined.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Row = dict[str, Any]
PARTS = ("check", "blocks", "vnet", "whole", "resnet", "swin", "timeline")
ROW_LIMIT_S = 75
FAILED = 3
"""A worker's exit code after a row that failed, and was written down."""


# --- networks
# -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One of many equal residual blocks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(channels, channels, 3, padding=1), nn.InstanceNorm3d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus an activated, normalised convolution of it."""
        return x + F.leaky_relu(self.norm(self.conv(x)), 0.01)


class Tutorial(nn.Module):
    """The tutorial's two halves, with or without its pipeline [1]_."""

    def __init__(self, split_size: int | None) -> None:
        super().__init__()
        from torchvision.models import resnet50

        net = resnet50()
        self.front = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2).to("cuda:0")
        self.back = nn.Sequential(net.layer3, net.layer4, net.avgpool).to("cuda:1")
        self.fc, self.split_size = net.fc.to("cuda:1"), split_size

    def forward(self, x: Tensor) -> Tensor:
        """Hand micro-batch after micro-batch from one half to the other."""
        pieces = iter(x.split(self.split_size or len(x)))
        waiting = self.front(next(pieces)).to("cuda:1")
        outputs = []
        for piece in pieces:
            outputs.append(self.fc(self.back(waiting).flatten(1)))
            waiting = self.front(piece).to("cuda:1")
        outputs.append(self.fc(self.back(waiting).flatten(1)))
        return torch.cat(outputs)


def build(name: str) -> nn.Module:
    """Return a network by the benchmark's name for it."""
    if name.startswith("blocks"):
        return nn.Sequential(*(Block(int(name.removeprefix("blocks"))) for _ in range(32)))
    if name == "vnet-eisen":
        from eisen.models.segmentation import VNet as EisenVNet

        return EisenVNet(1, 2, outputs_activation="none")
    if name == "resnet50":
        from torchvision.models import resnet50

        return resnet50()
    from monai.networks.nets import SwinUNETR, VNet

    if name == "swin":
        return SwinUNETR(1, 2, feature_size=48)
    net = VNet(out_channels=2)
    for module in net.modules():  # every wrapper would draw masks of its own
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return net


def wrap(row: Row, net: nn.Module) -> nn.Module:
    """Put the network on its devices, by the row's kind."""
    gpus, kind = list(range(row["gpus"])), row["kind"]
    if kind == "plain":
        return net.cuda()
    if kind == "data parallel":
        return nn.DataParallel(net.cuda(), gpus)
    if kind == "eisen":
        from eisen.utils import ModelParallel as EisenModelParallel

        return EisenModelParallel(net, row["split"], gpus)
    from volseg.parallel import ModelParallel

    if kind == "spatial":
        return ModelParallel(net.cuda(), strategy="spatial", devices=gpus)
    return ModelParallel(net.cuda(), strategy="pipeline", devices=gpus, split_size=row["split"], launch=row["launch"])


# --- one row
# --------------------------------------------------------------------------------------------------------------


def batch_of(row: Row) -> tuple[Tensor, Tensor]:
    """Return random images and labels on the first GPU."""
    shape = row["shape"]
    image = torch.randn(shape, device="cuda:0")
    if row["net"] == "resnet50":
        return image, torch.randint(0, 1000, shape[:1], device="cuda:0")
    return image, torch.randint(0, 2, (shape[0], *shape[2:]), device="cuda:0")


def objective(row: Row, output: Any, label: Tensor) -> Tensor:
    """Return a loss that costs little."""
    if row["kind"] == "spatial":
        output = output.full_tensor()
    if row["net"].startswith("blocks"):
        return output.square().mean()
    return F.cross_entropy(output.float(), label.to(output.device))


def synchronize() -> None:
    """Wait for every GPU."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def step_of(row: Row, model: nn.Module) -> Callable[[], float]:
    """Return a function that trains one step and returns its milliseconds."""
    image, label = batch_of(row)
    made: list[torch.optim.Optimizer] = []

    def step() -> float:
        synchronize()
        start = time.perf_counter()
        output = model(image)
        loss = objective(row, output, label)
        if not made:  # eisen-core exchanges parameters in its first forward
            made.append(torch.optim.SGD(list(model.parameters()) or [image.new_zeros(1).requires_grad_()], lr=1e-4))
        made[0].zero_grad()
        loss.backward()
        made[0].step()
        synchronize()
        return (time.perf_counter() - start) * 1e3

    return step


def measure(row: Row) -> Row:
    """Train some steps; return time, memory and, for ours, how near the bound it came."""
    torch.manual_seed(0)
    if row.get("fraction"):
        for index in range(row["gpus"]):
            torch.cuda.set_per_process_memory_fraction(row["fraction"], index)
    start = time.perf_counter()
    model = Tutorial(row["split"]) if row["kind"] == "tutorial" else wrap(row, build(row["net"]))
    step = step_of(row, model)
    first_ms = step()
    setup_s = time.perf_counter() - start
    for _ in range(row.get("warm", 6)):
        step()
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
    times = [step() for _ in range(row.get("steps", 10))]
    found: Row = {
        "ms": statistics.median(times),
        "ms_all": times,
        "first_ms": first_ms,
        "setup_s": setup_s,
        "samples_per_s": row["shape"][0] / statistics.median(times) * 1e3,
        "peak_gib": [torch.cuda.max_memory_allocated(i) / 2**30 for i in range(row["gpus"])],
        "reserved_gib": [torch.cuda.max_memory_reserved(i) / 2**30 for i in range(row["gpus"])],
    }
    if row["kind"] == "ours":
        found |= explain(model, row, found["ms"])
    if row.get("timeline"):
        found["timeline"] = timeline(step, row["gpus"])
    return found


def explain(model: Any, row: Row, ms: float) -> Row:
    """Compare with the bound of the measured partition."""
    partition = model.partition
    micro_batches = -(-row["shape"][0] // partition.samples)
    bound_ms = (micro_batches + len(partition.stages) - 1) * partition.slowest_ms
    return {
        "recorded": model.strategy.is_replaying,
        "micro_batches": micro_batches,
        "stage_ms": [stage.ms for stage in partition.stages],
        "layers_ms": partition.total_ms,
        "heaviest": [*partition.heaviest.modules, partition.heaviest.ms],
        "bound_gain": partition.bound(micro_batches),
        "bound_ms": bound_ms,
        "of_bound": bound_ms / ms,
        "table": str(partition),
    }


def timeline(step: Callable[[], float], gpus: int, bins: int = 200) -> list[list[float]]:
    """Return, per GPU, the share of each of ``bins`` intervals of one step in which a kernel ran."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    spans = [
        (event.device_index, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
    ]
    first, last = min(span[1] for span in spans), max(span[2] for span in spans)
    width = (last - first) / bins
    busy = [[0.0] * bins for _ in range(gpus)]
    for device, begin, end in spans:
        for place in range(int((begin - first) / width), min(bins, int((end - first) / width) + 1)):
            low = first + place * width
            busy[device][place] += max(0.0, min(end, low + width) - max(begin, low)) / width
    return [[round(min(1.0, share), 3) for share in row] for row in busy]


def check(row: Row) -> Row:
    """Compare five training steps, from eager to recorded, with the plain network's by micro-batches, in float64."""
    torch.manual_seed(0)
    net = build(row["net"]).double().cuda().eval()
    plain = build(row["net"]).double().cuda().eval()
    plain.load_state_dict(net.state_dict())
    model: Any = wrap(row, net)
    worst = 0.0
    for _ in range(5):
        image = torch.randn(row["shape"], device="cuda:0", dtype=torch.float64)
        actual, expected = model(image), torch.cat([plain(piece) for piece in image.split(row["split"])])
        worst = max(worst, (actual - expected).abs().max().item())
        actual.square().mean().backward()
        expected.square().mean().backward()
    pairs = [
        (p.grad, q.grad.to(p.device))
        for p, q in zip(net.parameters(), plain.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    ]
    gradient = max(((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)).item() for mine, theirs in pairs)
    recorded = model.strategy.is_replaying
    return {"largest_output_error": worst, "largest_relative_gradient_error": gradient, "recorded": recorded}


# --- all rows
# -------------------------------------------------------------------------------------------------------------


def rows(parts: list[str], gpus: int) -> Iterator[Row]:
    """Yield every measurement of the chosen parts, what matters most first."""
    counts = [count for count in (2, 4, 8) if count <= gpus]
    if "check" in parts:
        for launch in ("eager", "graphs"):
            for net in ("blocks4", "vnet-monai"):
                shape = [4, 4 if net == "blocks4" else 1, 16, 16, 16]
                yield row(
                    part="check", net=net, kind="ours", gpus=max(counts, default=1), split=2, launch=launch, shape=shape
                )
    if "blocks" in parts:
        for net, side in (("blocks32", 64), ("blocks16", 48)):
            same = row(part="blocks", net=net, shape=[32, int(net[6:]), side, side, side], split=2)
            yield from ours(same, [1, *counts], ["graphs"])
            yield row(same, kind="plain", gpus=1)
            yield from ours(same, [1, *counts], ["eager"])
    if "vnet" in parts:
        for split in (2, 4):
            for net in ("vnet-monai", "vnet-eisen"):
                same = row(part="vnet", net=net, shape=[32, 1, 64, 64, 64], split=split)
                yield from ours(same, counts, ["graphs"])
                yield row(same, kind="plain", gpus=1)
                yield from (row(same, kind="eisen", gpus=count) for count in counts)
                yield from ours(same, [max(counts, default=1)], ["eager"])
                if split == 2:
                    yield from (row(same, kind="data parallel", gpus=count) for count in counts)
        yield from ours(
            row(part="vnet", net="vnet-monai", shape=[32, 1, 64, 64, 64], split="auto"), counts[-1:], ["graphs"]
        )
        same = row(part="vnet", net="vnet-monai", shape=[32, 1, 64, 64, 64], split=2)
        yield from (row(same, kind="spatial", gpus=count) for count in counts[-1:])
    if "whole" in parts and gpus >= 8:
        for net in ("vnet-eisen", "vnet-monai"):
            same = row(part="whole", net=net, shape=[260, 1, 64, 64, 64], split=20, steps=5)
            yield from ours(same, [8], ["graphs"])
            yield from (row(same, kind=kind, gpus=count) for kind, count in (("eisen", 8), ("plain", 1)))
    if "resnet" in parts and gpus >= 2:
        same = row(part="resnet", net="resnet50", shape=[120, 3, 128, 128])
        yield row(same, kind="plain", gpus=1, split=None)
        for split in (20, 30, 60):
            yield from ours(row(same, split=split), [2], ["graphs"])
        yield from (row(same, kind="tutorial", gpus=2, split=split) for split in (None, 10, 20, 30, 60))
        yield from ours(row(same, split=30), [2], ["eager"])
    if "swin" in parts:
        # Of 139 GiB: less than one GPU needs for a batch of four, about what two or four need each.
        for fraction in (0.22, 0.16):
            same = row(part="swin", net="swin", shape=[4, 1, 96, 96, 96], split=1, fraction=fraction, steps=3, warm=2)
            yield row(same, kind="plain", gpus=1)
            yield from ours(same, [count for count in counts if count <= 4], ["eager"])
    if "timeline" in parts:
        same = row(part="timeline", net="vnet-monai", shape=[32, 1, 64, 64, 64], split=2, timeline=True, steps=3)
        yield from ours(same, counts[-1:], ["graphs", "eager"])


def row(same: Row | None = None, **fields: Any) -> Row:
    """Return a row, ``same`` with other or more ``fields``."""
    return {**(same or {}), **fields}


def ours(same: Row, counts: list[int], launches: list[str]) -> Iterator[Row]:
    """Yield ModelParallel's rows."""
    yield from (row(same, kind="ours", gpus=count, launch=launch) for count in counts for launch in launches)


def work(todo: Path, done: Path) -> None:
    """Run the rows of ``todo``, adding each to ``done``; stop at a failure, which may leave the GPUs in disorder."""
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for row in json.loads(todo.read_text()):
        failed = False
        try:
            result = check(row) if row["part"] == "check" else measure(row)
        except Exception as failure:
            failed = True
            result = {"error": f"{type(failure).__name__}: {failure}"[:2000], "where": traceback.format_exc()[-1500:]}
        with done.open("a") as lines:
            lines.write(json.dumps({**row, **result}) + "\n")
        if failed:
            os._exit(FAILED)  # a broken capture or an exhausted device must not spoil the next row
        torch.cuda.empty_cache()
        if row.get("fraction"):
            os._exit(0)


def supervise(todo: list[Row], output: Path, limit_s: float) -> list[Row]:
    """Run all rows, a new worker after every failure; keep ``output`` current."""
    queue, lines = output.with_suffix(".todo"), output.with_suffix(".rows")
    lines.write_text("")
    begun = time.monotonic()
    while (count := len(lines.read_text().splitlines())) < len(todo):
        if time.monotonic() - begun > limit_s:
            break
        queue.write_text(json.dumps(todo[count:]))
        worker = subprocess.Popen([sys.executable, __file__, "--worker", str(queue), "--output", str(lines)])
        seen, since = count, time.monotonic()
        while worker.poll() is None:
            time.sleep(0.5)
            if (now := len(lines.read_text().splitlines())) > seen:
                seen, since = now, time.monotonic()
                save(output, lines)
            if time.monotonic() - since > ROW_LIMIT_S or time.monotonic() - begun > limit_s:
                worker.kill()
                worker.wait()
        done = len(lines.read_text().splitlines())
        if worker.returncode not in (0, FAILED) and done < len(todo):
            error = f"the worker ended with {worker.returncode}, or the row took more than {ROW_LIMIT_S} s"
            with lines.open("a") as more:
                more.write(json.dumps({**todo[done], "error": error}) + "\n")
    save(output, lines)
    with contextlib.suppress(OSError):
        queue.unlink()
    return json.loads(output.read_text())["rows"]


def save(output: Path, lines: Path) -> None:
    """Write what there is, with what it was measured on."""
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    about = row(
        command=sys.argv, gpus=names, torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version()
    )
    output.write_text(
        json.dumps({"about": {**about, "cudnn": torch.backends.cudnn.version()}, "rows": found}, indent=1)
    )


def describe(row: Row) -> str:
    """Return a row as one line."""
    name = f"{row['part']:9}{row['net']:12}{row['kind']:14}{row.get('launch', ''):7}"
    name += f"{row['gpus']} GPUs, split {row['split']!s:5}"
    if "error" in row:
        return f"{name} failed: {row['error'].splitlines()[0][:150]}"
    if "ms" not in row:
        errors = f"{row['largest_output_error']:.1e}, {row['largest_relative_gradient_error']:.1e}"
        return f"{name} errors {errors}, recorded {row['recorded']}"
    tail = f"  {row['of_bound']:.0%} of its bound, recorded {row['recorded']}" if "of_bound" in row else ""
    return f"{name} {row['ms']:9.2f} ms  {row['samples_per_s']:8.1f}/s  {max(row['peak_gib']):6.2f} GiB{tail}"


COLOURS = {"ours": "#1b6ca8", "plain": "#777", "eisen": "#c0392b"}


def rectangle(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    """Return a rectangle of an SVG."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} fill="{colour}" opacity="{opacity}"/>'


def plot(found: list[Row], path: Path) -> None:
    """Draw time per step and memory per GPU as bars, and the timelines, in one SVG."""
    bars = [row for row in found if "ms" in row and row["part"] in ("vnet", "blocks", "whole", "resnet")]
    slowest, fullest = max(row["ms"] for row in bars), max(max(row["peak_gib"]) for row in bars)
    drawn, y = ['<text x="10" y="20">ms per step</text><text x="900" y="20">GiB on each GPU</text>'], 40
    for row in bars:
        colour, width = COLOURS.get(row["kind"], "#d9a441"), 500 * row["ms"] / slowest
        label = f"{row['net']}, {row['kind']} {row.get('launch', '')} {row['gpus']} GPU, split {row['split']}"
        drawn.append(f'<text x="10" y="{y + 10}">{label}</text>')
        drawn.append(rectangle(330, y, width, 11, colour))
        drawn.append(f'<text x="{335 + width:.1f}" y="{y + 10}">{row["ms"]:.1f}</text>')
        for gpu, gib in enumerate(row["peak_gib"]):
            height = 11 * gib / fullest
            drawn.append(rectangle(900 + 14 * gpu, y + 11 - height, 12, height, colour))
        y += 15
    for row in (row for row in found if row.get("timeline")):
        y += 30
        label = f"one step of {row['net']}, {row['launch']}: when each GPU computes"
        drawn.append(f'<text x="10" y="{y - 5}">{label}</text>')
        for busy in row["timeline"]:
            drawn += [rectangle(330 + 3 * i, y, 3, 11, "#1b6ca8", share) for i, share in enumerate(busy)]
            y += 14
    size = f'width="1040" height="{y + 20}" font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{ground}{"".join(drawn)}</svg>')


def main() -> None:
    """Run, or be a worker of such a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="use so many")
    parser.add_argument("--limit-s", type=float, default=570, help="stop after so many seconds; what is done is kept")
    parser.add_argument("--plot", type=Path, help="SVG to draw")
    parser.add_argument("--no-run", action="store_true", help="only draw and print an existing output")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.output)
    if arguments.no_run:
        found = json.loads(arguments.output.read_text())["rows"]
    else:
        found = supervise(list(rows(arguments.parts, arguments.gpus)), arguments.output, arguments.limit_s)
    print("\n".join(map(describe, found)))
    if arguments.plot:
        plot(found, arguments.plot)
    return None


if __name__ == "__main__":
    main()
