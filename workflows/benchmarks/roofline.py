"""The roofline of a training step: each layer's time against what the device needs at best, and what is far above.

    python workflows/benchmarks/roofline.py --result roofline.json                     # DynUNet's step, on this GPU
    python workflows/benchmarks/roofline.py --gpu h200 --result roofline.json          # forecast, without a GPU
    python workflows/benchmarks/roofline.py CONFIG --set patch.batch=4 --result roofline.json
    python workflows/benchmarks/roofline.py --against before.json --result after.json  # what has changed

The bound of a layer is the sum over its kernels of the longer of two times: bytes by the memory's bandwidth, each
tensor read or written once, and multiplications by the matrix units' rate, both as the vendor publishes them. Printed
are the step, its bound, and the layers that take more than ``--times`` theirs, by the time that is to be had there.
The JSON has all layers: what ``volseg profile --json`` prints, and these sums.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from volseg import experiment
from volseg.config.shipped import find_shipped
from volseg.monitoring.environment import environment
from volseg.profiling.report import LayerRow, ProfileReport
from volseg.profiling.table import tell_seconds
from volseg.profiling.words import FAR, find_far

DYNUNET = (
    "network={name: DynUNet, filters: [32, 64, 128, 256, 320, 320]}",
    "patch={size: [128, 128, 128], batch: 1}",
    "optimizer={name: SGD, lr: 0.01, momentum: 0.99, nesterov: true}",
    "training={epochs: 1, iterations: 1}",
    "augmentation={enabled: false}",
)
"""The step that the other benchmarks of networks take: forward, DiceCELoss, backward, SGD."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", help="default DynUNet's step of 128^3")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--gpu", metavar="KIND", help="forecast for a GPU that is not here")
    parser.add_argument("--gpus", type=int, help="of that kind")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--times", type=float, default=FAR, help="the bound, above which a layer is named")
    parser.add_argument("--against", type=Path, help="an earlier result")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    before = None if chosen.against is None else read_result(chosen.against)
    usual = () if chosen.config is not None else DYNUNET
    config = experiment.load_config(chosen.config or find_shipped("task04_unet"), [*usual, *chosen.set])
    profiled = experiment.profile_training(config, steps=chosen.steps, gpu=chosen.gpu, num_gpus=chosen.gpus)
    result = {
        "command": shlex.join(["python", *sys.argv]) if arguments is None else "",
        "environment": environment(),
        **summarise(profiled.report, chosen.times),
        "profile": json.loads(profiled.to_json()),
    }
    chosen.result.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print("\n".join(describe(profiled.report, chosen.times)))
    if before is not None:
        print("\n".join(compare(before, profiled.report)))


def read_result(file: Path) -> ProfileReport:
    """Return the profile in an earlier result."""
    return ProfileReport.model_validate(json.loads(file.read_text(encoding="utf-8"))["profile"])


def summarise(report: ProfileReport, times: float) -> dict[str, Any]:
    """Return the step against its bound, and the layers that are more than ``times`` above theirs."""
    bounds = [row.bound for row in report.layers if row.bound is not None]
    far = find_far(report.layers, times=times)
    return {
        "step_seconds": report.step_seconds,
        "bound_seconds": sum(bounds) if bounds else None,
        "times_bound": report.step_seconds / sum(bounds) if bounds and sum(bounds) else None,
        "above": times,
        "far": [name(row) for row in far],
        "seconds_above": sum(row.seconds - (row.bound or 0.0) for row in far),
    }


def name(row: LayerRow) -> str:
    """Return what tells a row from all others."""
    return f"{row.layer} {row.direction}" + (f" on {row.device}" if row.device else "")


def describe(report: ProfileReport, times: float) -> list[str]:
    """Return the lines that are printed."""
    told = summarise(report, times)
    lines = [
        f"{report.network}, {' x '.join(map(str, report.shape))}, {report.precision}, {report.device}, "
        f"{report.parallel} ({report.source}): {report.limit}",
        f"a step takes {tell_seconds(report.step_seconds)}",
    ]
    if told["bound_seconds"]:
        lines[-1] += f", {told['times_bound']:.2f} times its bound of {tell_seconds(told['bound_seconds'])}"
    rows = find_far(report.layers, times=times)
    lines.append(f"{len(rows)} of {len(report.layers)} rows take more than {times:g} times their bound:")
    lines += [
        f"  {name(row):60s} {tell_seconds(row.seconds):>8s} of {tell_seconds(row.bound):>8s}, "
        f"{row.times_bound:5.2f} times"
        for row in rows
    ]
    return lines


def compare(before: ProfileReport, after: ProfileReport) -> list[str]:
    """Return what has changed, the largest change first."""
    was = {name(row): row.seconds for row in before.layers}
    now = {name(row): row.seconds for row in after.layers}
    changes = {key: now.get(key, 0.0) - was.get(key, 0.0) for key in {**was, **now}}
    lines = [f"before {tell_seconds(before.step_seconds)}, now {tell_seconds(after.step_seconds)} a step; by layer:"]
    for key, change in sorted(changes.items(), key=lambda item: (-abs(item[1]), item[0]))[:20]:
        sign = "-" if change < 0 else "+"
        lines.append(
            f"  {key:60s} {tell_seconds(was.get(key, 0.0)):>8s} -> {tell_seconds(now.get(key, 0.0)):>8s} "
            f"({sign}{tell_seconds(abs(change))})"
        )
    return lines


if __name__ == "__main__":
    main()
