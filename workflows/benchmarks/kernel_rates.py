"""How long kernels and the links between GPUs take: the table that forecasts of time are read from.

    python workflows/benchmarks/kernel_rates.py --seconds 45 --result kernel_rates.json

All GPUs of the machine share the cases of kernels; with two or more the links are measured as well. Behind
``--seconds`` no further case is begun, and the result names those that are missing.
"""

import argparse
import json
import os
import random
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rate_convolutions import list_convolutions
from rate_links import measure_copies, measure_group
from rate_passes import Prepared, RateCase, count_run, list_others, list_passes
from torch import nn

from volseg.device import triton_tiles
from volseg.estimate.trace import KernelRun
from volseg.losses.dice import passes as dice
from volseg.losses.dice.reference import Terms
from volseg.parallel import FastKernels
from volseg.profiling.calibration import describe_machine, measure_host, time_calls

Measured = dict[str, Any]
"""A row of the table: the fields of a ``KernelRun``, and ``seconds``."""


def main() -> None:
    """Measure by a process per GPU, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45, help="in which cases of kernels are begun")
    parser.add_argument("--gpus", type=int, help="all, unless told")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    begun = time.monotonic()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums by the switch itself need rights that not every host gives
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    os.environ["MASTER_PORT"] = str(port)
    gpus = chosen.gpus or torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        failed = ""
        try:
            torch.multiprocessing.spawn(work, (gpus, chosen.seconds, folder), nprocs=gpus)
        except torch.multiprocessing.ProcessException as fault:  # what was measured by then is kept
            failed = str(fault)
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": parts[0]["machine"],
        "host": parts[0]["host"],
        # Copies last, when no other process has a kernel that waits on the other GPU.
        "links": [*parts[0]["links"], *measure_copies()],
        "rows": [row for part in parts for row in part["rows"]],
        "left_out": {name: why for part in parts for name, why in part["left_out"].items()},
        "failed": failed,
        "took_s": {"kernels": max(part["kernels_s"] for part in parts), "all": time.monotonic() - begun},
    }
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(len(result["rows"]), "rows,", len(result["left_out"]), "left out,", result["took_s"], failed)


def work(rank: int, gpus: int, seconds: float, folder: str) -> None:
    """Measure this GPU's share of the cases, then the links together with the others."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    machine = describe_machine(device)
    begun = time.monotonic()
    host = {**measure_host(device), "slab": measure_slabs(device)} if rank == 0 else {}
    cases = [*list_loss_cases(), *list_cases()][rank::gpus]
    rows, left_out = measure_cases(cases, device, time.monotonic() + seconds)
    found: dict[str, Any] = {
        "machine": machine,
        "host": host,
        "rows": rows,
        "left_out": left_out,
        "kernels_s": time.monotonic() - begun,
        "links": [],
    }
    save(found, rank, folder)
    torch.cuda.empty_cache()
    if gpus > 1:
        dist.init_process_group("nccl", rank=rank, world_size=gpus, device_id=device, timeout=timedelta(seconds=90))
        found["links"] = measure_group(rank, gpus, device)
        dist.barrier(device_ids=[rank])
        save(found, rank, folder)
        dist.destroy_process_group()


def list_cases() -> list[RateCase]:
    """Return all cases in an order of which any beginning covers every kind."""
    cases = [*list_convolutions(), *list_passes(), *list_others()]
    if not triton_tiles.available():
        cases = [case for case in cases if "ours" not in case.name]
    random.Random(0).shuffle(cases)  # noqa: S311  (the same order everywhere: processes share the list)
    return cases


def describe_run(run: KernelRun, seconds: float) -> Measured:
    """Return a row as JSON keeps it."""
    return {**asdict(run), "dtype": str(run.dtype).removeprefix("torch."), "seconds": seconds}


def measure_cases(
    cases: Sequence[RateCase], device: torch.device, until: float
) -> tuple[list[Measured], dict[str, str]]:
    """Time the cases in their order until ``time.monotonic`` says ``until``; return rows, and why others have none."""
    rows: list[Measured] = []
    left_out: dict[str, str] = {}
    # Not what is left of another process's memory while it starts: half of what this GPU has.
    room = torch.cuda.get_device_properties(device).total_memory // 2
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):
        for case in cases:
            if time.monotonic() > until:
                left_out[case.name] = "no time was left"
            elif 2 * case.size > room:
                left_out[case.name] = f"takes {case.size / 2**30:.1f} GiB"
            else:
                try:
                    rows += [describe_run(run, time_calls(call, stream)) for run, call in case.prepare(device)]
                except Exception as fault:  # no such kernel on this GPU, too little memory: the others count
                    left_out[case.name] = f"{type(fault).__name__}: {fault}"[:300]
                    torch.cuda.synchronize()  # raises, where the GPU itself has failed
    return rows, left_out


BLOCKS, KERNELS_OF_A_BLOCK = 10, 9
"""Of a convolution, a norm and an activation on slabs: four kernels forward (the convolution, moments, coefficients,
scale and activation), five backward (these again, sums, coefficients, the input's gradient, the convolution's)."""


def measure_slabs(device: torch.device, steps: int = 20) -> float:
    """Return the host's seconds per kernel of a network on slabs that is small enough for the GPU to wait."""
    layers: list[nn.Module] = []
    for _ in range(BLOCKS):
        layers += [nn.Conv3d(8, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU()]
    model = FastKernels(nn.Sequential(*layers), device)
    x = torch.randn(1, 8, 8, 8, 8, device=device)
    times = []
    for _ in range(5 + steps):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[5:]) / (BLOCKS * KERNELS_OF_A_BLOCK)


LOGITS = ((2, 64), (3, 128), (14, 96), (3, 160))
"""Classes and side of the volumes."""


def prepare_loss(classes: int, side: int, device: torch.device) -> list[Prepared]:
    """Return the kernels of Dice plus cross entropy, which read logits and labels once."""
    logits = torch.randn(1, classes, *[side] * 3, device=device, dtype=torch.bfloat16)
    label = torch.randint(0, classes, (1, 1, *[side] * 3), device=device, dtype=torch.uint8)
    sums = dice.sums(logits, label, False)
    loss, slopes = dice.combine(sums, Terms(), logits.shape)
    return [
        (
            count_run("losses.dice.passes._sums_kernel", logits.dtype, (logits, label)),
            lambda: dice.sums(logits, label, False),
        ),
        (
            count_run("losses.dice.passes._combine_kernel", sums.dtype, (sums, loss)),
            lambda: dice.combine(sums, Terms(), logits.shape),
        ),
        (
            count_run("losses.dice.passes._gradient_kernel", logits.dtype, (logits, label, logits)),
            lambda: dice.gradient(logits, label, slopes, False),
        ),
    ]


def list_loss_cases() -> list[RateCase]:
    """Return the cases of the loss that has kernels of its own."""
    return [
        RateCase(
            f"dice of ours, {classes} classes, {side}^3",
            8 * classes * side**3,
            partial(prepare_loss, classes, side),
        )
        for classes, side in LOGITS
    ]


def save(found: dict[str, Any], rank: int, folder: str) -> None:
    """Write what this process has so far."""
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
