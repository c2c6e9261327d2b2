"""How much scratch memory cuDNN takes for convolutions of many shapes: what the forecast's rule is read from.

    python workflows/benchmarks/convolution_workspaces.py --seconds 40 --result convolution_workspaces.json

Torch hands cuDNN a block of its own allocator for the time of each call: the most that was asked for during the call,
less what was asked for after it, is its size. Forward, the gradient of the input and that of the weight are measured of
each shape. Shapes are drawn at random, so that those of half the time are a fair half; every GPU has a share of them.

With ``--table volseg/estimate/tables/convolutions_h200.json.gz`` an earlier result is added to the table of the
forecast, in place of what that had for the same shapes.
"""

import argparse
import gzip
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from volseg.monitoring.environment import environment

CHANNELS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512)
KERNELS = ((1, 1, False), (1, 2, False), (2, 2, False), (3, 1, False), (3, 2, False), (5, 1, False), (2, 2, True))
"""Side of the kernel, stride, and whether the convolution is transposed."""
SIDES = (4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96, 128, 160, 192)
BATCHES = (1, 1, 2, 4, 8, 32)
LARGEST = 3 * 2**30
"""Bytes of the larger volume."""
ORDERS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}


def main() -> None:
    """Measure by a process per GPU, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="after which no shape is begun")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", type=Path, help="JSON list of shapes instead of drawn ones")
    parser.add_argument("--table", type=Path, help="of the forecast, to add the result to instead of measuring")
    chosen = parser.parse_args()
    if chosen.table is not None:
        add_to_table(json.loads(chosen.result.read_text(encoding="utf-8"))["rows"], chosen.table)
        return
    given = json.loads(chosen.shapes.read_text(encoding="utf-8")) if chosen.shapes else None
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (gpus, chosen.seconds, chosen.seed, folder, given)
        torch.multiprocessing.spawn(work, arguments, nprocs=gpus)
        rows = [row for path in sorted(Path(folder).iterdir()) for row in json.loads(path.read_text(encoding="utf-8"))]
    result = {"command": shlex.join(["python", *sys.argv]), "environment": environment(), "rows": rows}
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(len(rows), "shapes")


def add_to_table(rows: list[dict[str, Any]], table: Path) -> None:
    """Put what was measured into the table that `volseg.estimate.workspaces` reads."""
    known = json.loads(gzip.decompress(table.read_bytes())) if table.exists() else []
    found = {json.dumps(row[:-1]): row[-1] for row in known}
    for row in rows:
        kind = [row["kernel"] ** 3, getattr(torch, row["dtype"]).itemsize, row["order"] == "channels_last"]
        for part in ("forward", "input_gradient", "weight_gradient") if "failed" not in row else ():
            shape = [part, row["input"], row["output"], *kind, row["stride"] > 1, row["transposed"]]
            found[json.dumps(shape)] = row[part]
    told = [[*json.loads(shape), size] for shape, size in found.items()]
    table.write_bytes(gzip.compress(json.dumps(told, separators=(",", ":")).encode(), mtime=0))
    print(len(told), "sizes in", table)


def work(rank: int, gpus: int, seconds: float, seed: int, folder: str, given: list[dict[str, Any]] | None) -> None:
    """Measure this GPU's share of the shapes."""
    device, until = torch.device("cuda", rank), time.monotonic() + seconds
    torch.cuda.set_device(device)
    rows = []
    for number, shape in enumerate(draw_shapes(seed) if given is None else given):
        if time.monotonic() > until:
            break
        if number % gpus == rank:
            rows.append(shape | measure(shape, device))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(rows), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def draw_shapes(seed: int) -> Iterator[dict[str, Any]]:
    """Yield shapes without end."""
    chance = random.Random(seed)  # noqa: S311 (no secrets)
    while True:
        kernel, stride, transposed = chance.choice(KERNELS)
        first = chance.choice(CHANNELS)
        second = chance.choice((first, first, 2 * first, first // 2 or 1, chance.choice(CHANNELS)))
        sides, batch = [chance.choice(SIDES)] * 3, chance.choice(BATCHES)
        if chance.random() < 0.3:
            sides = [chance.choice(SIDES) for _ in range(3)]
        dtype, order = chance.choice(("bfloat16", "bfloat16", "float32")), "contiguous"
        if chance.random() < 0.1:
            order = "channels_last"
        grown = stride**3 if transposed else 1
        voxels = batch * sides[0] * sides[1] * sides[2]
        if voxels * max(first, second * grown) * (2 if dtype == "bfloat16" else 4) > LARGEST or min(sides) < kernel:
            continue
        yield {"input": [batch, first, *sides], "out": second, "kernel": kernel, "stride": stride} | {
            "transposed": transposed,
            "dtype": dtype,
            "order": order,
        }


def measure(shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the bytes of scratch memory of each pass."""
    dtype, order = getattr(torch, shape["dtype"]), ORDERS[shape["order"]]
    kernel, stride, transposed, first = shape["kernel"], shape["stride"], shape["transposed"], shape["input"][1]
    sides = [kernel] * 3
    size = [first, shape["out"], *sides] if transposed else [shape["out"], first, *sides]
    found: dict[str, Any] = {}
    try:
        image = torch.empty(shape["input"], dtype=dtype, device=device).to(memory_format=order)
        weight = torch.empty(size, dtype=dtype, device=device).to(memory_format=order)
        bias = None if shape.get("bias") is False else torch.empty(shape["out"], dtype=dtype, device=device)
        padding = 0 if transposed or kernel == stride else kernel // 2
        told = ([stride] * 3, shape.get("padding", [padding] * 3), [1] * 3, transposed, [0] * 3, 1)
        out, found["forward"] = watch(lambda: torch.ops.aten.convolution(image, weight, bias, *told), device)
        found["output"] = list(out.shape)
        grad = torch.empty_like(out)
        for name, mask in (("input_gradient", (True, False, False)), ("weight_gradient", (False, True, False))):
            _, found[name] = watch(
                lambda mask=mask: torch.ops.aten.convolution_backward(grad, image, weight, None, *told, list(mask)),  # type: ignore[misc]
                device,
            )
    except torch.OutOfMemoryError as fault:
        found["failed"] = str(fault)[:100]
    return found


def watch(run: Any, device: torch.device) -> tuple[Any, int]:
    """Return what ``run`` returns, and the bytes that it asked for beyond that."""
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    told = torch.cuda.memory_stats(device)
    return result, told["requested_bytes.all.peak"] - told["requested_bytes.all.current"]


if __name__ == "__main__":
    main()
