"""What each fusion is worth: a recorded step with all of them, and with each one off, in turns on one GPU.

    python workflows/benchmarks/fusions.py --networks SegResNet UNet --result runs/fusions.json --seconds 50

Networks and steps are those of ``networks.py``. Printed for each network: milliseconds with all fusions, and how many
times as long it takes without each (above 1 it pays), with the loss after the same steps beside it, which must agree.
All means those too that are off by default until they were measured.
``--device cpu --small --sides 32 32 32`` tries it without a GPU.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from networks_listed import NETWORKS, fit
from networks_rows import MeasuredStep

from volseg.device import fusions
from volseg.files import replacing
from volseg.monitoring.environment import environment

__all__ = ["main", "measure"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS, metavar="NETWORK")
    parser.add_argument("--fusions", nargs="+", choices=fusions.NAMES, default=fusions.NAMES, metavar="FUSION")
    parser.add_argument("--sides", type=int, nargs=3, default=(128, 128, 128), metavar=("D", "H", "W"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=50, help="after which no network is begun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="networks of a few channels")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    begin = time.perf_counter()
    rows: dict[str, Any] = {}
    for name in chosen.networks:
        if time.perf_counter() - begin > chosen.seconds:
            print(f"{name}: left out, {chosen.seconds:g} s are over")
            continue
        rows[name] = measure(name, chosen)
        print(describe(name, rows[name]), flush=True)
        report = {"command": shlex.join(["python", *sys.argv]), "environment": environment(), "networks": rows}
        with replacing(chosen.result) as partial:
            partial.write_text(json.dumps(report, indent=1), encoding="utf-8")


def measure(name: str, chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return milliseconds and loss of a network's step with all fusions, and without each.

    Parameters
    ----------
    name : str
        One of ``NETWORKS``.
    chosen : argparse.Namespace
        What was asked for.
    """
    device = torch.device(chosen.device)
    row = {"kind": "ours", "record": True, "network": name, "small": chosen.small, "device": chosen.device}
    sides = fit(name, tuple(chosen.sides))
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, MeasuredStep] = {}
    for off in ("", *chosen.fusions):
        with fusions.without(*([off] if off else [])):
            steps[off] = MeasuredStep({**row, "sides": sides}, device)
            told = steps[off].warm_up()
        found[off or "all"] = {"loss": told["loss"], "ms": []}
    for _ in range(chosen.turns):
        for off, step in steps.items():
            with fusions.without(*([off] if off else [])):  # a step that was not recorded runs again
                found[off or "all"]["ms"].append(step.time())
    return {off: {"loss": row["loss"], "ms": statistics.median(row["ms"])} for off, row in found.items()}


def describe(name: str, rows: dict[str, dict[str, float]]) -> str:
    """Return what was found as lines."""
    best = rows["all"]
    lines = [f"{name}: {best['ms']:.2f} ms, loss {best['loss']:.6f}"]
    for off, row in rows.items():
        if off != "all":
            lines.append(f"  without {off}: {row['ms'] / best['ms']:.3f} times as long, loss {row['loss']:.6f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
