"""Milliseconds of a training step in several checkouts of volseg, in turns in one run: what a change costs.

python workflows/benchmarks/checkouts.py before=DIR after=. --result checkouts.json

Each round measures every checkout once, in a process of its own. ``host`` is the shortest time in which Python launched
a step: what other programs on the machine do can only make it longer. ``step`` is the mean time of a step in a row of
them, as in training. With ``--operators`` it is the host time of single operators on slabs of 32 voxels, on the CPU.
"""

import argparse
import importlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WARM_UP, MEASURED = 8, 30

ROWS = [
    ("DynUNet", 64, "eager"),
    ("DynUNet", 128, "recorded"),
    ("UNet", 64, "eager"),
    ("UNet", 128, "recorded"),
    ("VNet", 64, "eager"),
    ("VNet", 128, "recorded"),
    ("AttentionUnet", 64, "eager"),
]
"""Network, side of the cube (voxels), and whether the step is recorded."""


KERNEL, WIDE = torch.randn(2, 2, 3, 3, 3), torch.randn(2, 2, 2, 2, 2)
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "convolution": lambda x: F.conv3d(x, KERNEL, None, 1, 1),
    "transposed convolution": lambda x: F.conv_transpose3d(x, WIDE, None, 2),
    "instance norm": lambda x: F.instance_norm(x)._slabs,
    "leaky ReLU": lambda x: F.leaky_relu(x, 0.01),
    "ReLU in place": lambda x: F.relu(x, inplace=True),
    "sum": lambda x: x + x,
    "join of channels": lambda x: torch.cat([x, x], 1).slabs,
    "max pooling": lambda x: F.max_pool3d(x, 2),
    "interpolation": lambda x: F.interpolate(x, scale_factor=2),
    "mean": lambda x: x.mean((2, 3, 4)),
    "softmax": lambda x: x.softmax(1),
    "slice": lambda x: x[:, 0],
}


def main() -> None:
    """Measure all checkouts in turns and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", help="NAME=FOLDER")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--worker", action="store_true", help="measure the volseg that is imported; for this script")
    chosen = parser.parse_args()
    if chosen.worker:
        found = operators() if chosen.operators else [measure(*row, torch.device(chosen.device)) for row in ROWS]
        print(json.dumps(found))
        return
    folders = dict(checkout.split("=", 1) for checkout in chosen.checkouts)
    rounds: dict[str, list[list[dict[str, float]]]] = {name: [] for name in folders}
    for number in range(chosen.rounds):
        for name, folder in folders.items():
            rounds[name].append(run(folder, ["--operators"] if chosen.operators else ["--device", chosen.device]))
            print(f"round {number + 1}, {name}: {rounds[name][-1]}", flush=True)
    first = next(iter(folders))
    rows = []
    labels = (
        [{"operator": name} for name in OPERATORS]
        if chosen.operators
        else [{"network": network, "side": side, "mode": mode} for network, side, mode in ROWS]
    )
    for index, label in enumerate(labels):
        row: dict[str, Any] = dict(label)
        for kind in rounds[first][0][index]:
            middle = min if kind == "host" else statistics.median
            found = {name: middle(r[index][kind] for r in rounds[name]) for name in folders}
            row[kind] = found | {f"{name} / {first}": value / found[first] for name, value in found.items()}
        rows.append(row)
    from volseg.monitoring.environment import environment

    report = {"command": shlex.join(["python", *sys.argv]), "environment": environment(), "rows": rows}
    report["rounds"] = rounds
    chosen.result.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def run(folder: str, options: list[str]) -> list[dict[str, float]]:
    """Measure one checkout in a process of its own."""
    paths = os.pathsep.join(filter(None, [str(Path(folder).resolve()), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, "--worker", *options]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, check=False, encoding="utf-8"
    )
    if done.returncode:
        raise RuntimeError(f"measuring {folder} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def find(*places: str) -> Any:
    """Return what the first place has that a checkout knows, ``MODULE:NAME``: names move from one to the next."""
    for place in places:
        module, name = place.split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {places} is there")


def operators() -> list[dict[str, float]]:
    """Return the shortest host time of operators (microseconds), of 600 rows of five calls."""
    context = find("volseg.parallel.spatial.context:Context", "volseg.parallel.sharding.context:Context")
    local_devices = find(
        "volseg.parallel.spatial.transport.one_process:LocalDevices", "volseg.parallel.sharding.local:LocalDevices"
    )
    from_whole = find("volseg.parallel.spatial.volume:from_whole", "volseg.parallel.sharding.volume:from_whole")
    torch.set_num_threads(1)
    volume = from_whole(torch.randn(1, 2, 8, 2, 2), [2], context(local_devices(["cpu"])))
    found = []
    for call in OPERATORS.values():
        shortest = float("inf")
        for _ in range(600):
            begin = time.perf_counter()
            for _ in range(5):
                call(volume)
            shortest = min(shortest, (time.perf_counter() - begin) / 5)
        found.append({"host": 1e6 * shortest})
    return found


def build(name: str) -> nn.Module:
    """Return a network of the field's usual size."""
    from monai.networks import nets

    torch.manual_seed(0)
    if name == "DynUNet":
        return nets.DynUNet(
            3, 1, 3, [3] * 5, [1, 2, 2, 2, 2], [2] * 4, filters=[32, 64, 128, 256, 320], norm_name="instance"
        )
    if name == "UNet":
        return nets.UNet(3, 1, 3, (32, 64, 128, 256, 320), (2, 2, 2, 2), num_res_units=2)
    if name == "VNet":
        return nets.VNet(3, 1, 3, dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0))
    return nets.AttentionUnet(3, 1, 3, (32, 64, 128, 256), (2, 2, 2))


def measure(name: str, side: int, mode: str, device: torch.device) -> dict[str, float]:
    """Return milliseconds of a step: forward in bfloat16, loss, backward, optimizer."""
    from volseg.parallel import ModelParallel

    losses = "volseg.losses", "volseg.parallel.sharding.dice_cross_entropy"
    terms, dice_cross_entropy = (
        find(*(f"{place}:{name}" for place in losses)) for name in ("Terms", "dice_cross_entropy")
    )
    recorded_step = find("volseg.parallel:RecordedStep", "volseg.parallel:CapturedStep")
    model = ModelParallel(build(name), strategy="spatial", devices=[device])
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=device.type == "cuda")
    image = torch.randn(1, 1, side, side, side, device=device)
    label = torch.randint(3, (1, 1, side, side, side), device=device).float()

    def step(image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = dice_cross_entropy(model(image), label, terms())
        loss.backward()
        optimizer.step()
        return loss.detach()

    run_step: Callable[..., Any] = recorded_step(model, step, optimizer=optimizer) if mode == "recorded" else step
    host = []
    for _ in range(WARM_UP + MEASURED):
        begin = now(device)
        run_step(image, label)
        host.append(1000 * (time.perf_counter() - begin))
    begin = now(device)
    for _ in range(MEASURED):
        run_step(image, label)
    return {"host": min(host[WARM_UP:]), "step": 1000 * (now(device) - begin) / MEASURED}


def now(device: torch.device) -> float:
    """Return the time once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
