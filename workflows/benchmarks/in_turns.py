"""Run one benchmark of several checkouts in turns, each its own copy of the script, and compare what they measured.

python workflows/benchmarks/in_turns.py before=DIR after=. --result compared.json --keys ms --rounds 3 -- \
    spatial.py --gpus 1 --output OUTPUT

``OUTPUT`` stands for the JSON that the benchmark writes, ``CHECKOUT`` for the checkout's folder. Numbers under the
``--keys`` are compared in the order in which they stand there: medians over the rounds, and their ratio to the first
checkout's. A change of speed that is none of the code's shows in the rounds.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from volseg.monitoring.environment import environment


def main() -> None:
    """Run the benchmark of each checkout in turns and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--keys", nargs="+", default=["ms"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = sys.argv[1:]
    split = arguments.index("--")
    chosen, benchmark = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    folders = dict(checkout.split("=", 1) for checkout in chosen.checkouts)
    rounds: dict[str, list[list[tuple[str, float]]]] = {name: [] for name in folders}
    for number in range(chosen.rounds):
        for name, folder in folders.items():
            rounds[name].append(list(numbers(run(folder, benchmark), frozenset(chosen.keys))))
            print(f"round {number + 1}, {name}: {rounds[name][-1]}", flush=True)
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "rows": list(compared(rounds)),
        "rounds": rounds,
    }
    chosen.result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run(folder: str, benchmark: list[str]) -> Any:
    """Run a checkout's copy of a benchmark; return the JSON it wrote."""
    script, *options = benchmark
    root = Path(folder).resolve()
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output.json"
        command = [sys.executable, str(root / "workflows" / "benchmarks" / script)]
        command += [str(output) if option == "OUTPUT" else option.replace("CHECKOUT", str(root)) for option in options]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, encoding="utf-8")
        if done.returncode or not output.exists():
            raise RuntimeError(f"{script} of {folder} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(output.read_text(encoding="utf-8"))


def numbers(value: Any, keys: frozenset[str], label: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers under ``keys`` of nested JSON, with what they are of."""
    if isinstance(value, list):
        for part in value:
            yield from numbers(part, keys, label)
    elif isinstance(value, dict):
        plain = [str(part) for key, part in value.items() if isinstance(part, str | bool | int) and key != "command"]
        shape = [str(value["shape"])] if "shape" in value else []
        own = ", ".join([*filter(None, [label]), *plain[:8], *shape]) if keys & value.keys() else label
        for key, part in value.items():
            if key in keys:
                measured = part if isinstance(part, list) else [part]
                yield from ((f"{own}: {key}", float(number)) for number in measured)
            elif isinstance(part, dict | list):
                yield from numbers(part, keys, f"{label}, {key}" if label else key)


def compared(rounds: dict[str, list[list[tuple[str, float]]]]) -> Iterator[dict[str, Any]]:
    """Yield the medians of each number, and their ratios to the first checkout's."""
    first, *others = rounds
    for index, (label, _) in enumerate(rounds[first][0]):
        medians = {name: statistics.median(found[index][1] for found in each) for name, each in rounds.items()}
        ratios = {f"{name} / {first}": medians[name] / medians[first] for name in others}
        yield {"of": label, **medians, **ratios}


if __name__ == "__main__":
    main()
