"""A training step of twelve networks: plain, compiled, and ours, on one GPU and on two, in turns.

    python workflows/benchmarks/networks.py --result networks.json --seconds 540
    python workflows/benchmarks/networks.py --result networks.json --seconds 540 --gpus 2 --sides 160 320 320

A step is forward, DiceCE, backward and SGD in bfloat16 on one volume (``--sides``, of each GPU). Rows of one network
are measured in turns, so that their ratios are those of one GPU at one time; a row's milliseconds are the median over
its turns. Beside them: memory per voxel, and how far ours is from the plain network in float32.

Each row is a process of its own, for a compiler may hang, or take the process with it: such a row says what went wrong,
and the others go on. Compiling takes minutes of one core, so the processes of several networks (``--ahead``) get ready
side by side, one for each core, and nothing is timed meanwhile; then each GPU is one network's at a time. What is
compiled stays in ``--cache``. Processes that wait give their memory back.

The JSON is rewritten after each network. What it has is not measured again unless it failed for want of time
(``--again`` measures what is asked for in any case); nothing is begun after ``--seconds``. Beside it lies a plot.
``--device cpu --small --sides 32 32 32`` tries everything without a GPU.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from networks_listed import NETWORKS, TUNED, fit
from networks_rows import BY_DEFAULT, ROWS, Row, compare, plot
from results import make_parser, name_command, read_result, write_result
from workers import LATE, Worker, ask, count_gpus, number_jobs

WORKER = Path(__file__).with_name("networks_rows.py")


def main() -> None:
    """Measure what was asked for, and write it."""
    parser = make_parser(__doc__)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=TUNED, metavar="NETWORK")
    told = "by default without max-autotune, and with all fusions"
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), metavar="ROW", default=BY_DEFAULT, help=told)
    parser.add_argument("--sides", type=int, nargs=3, default=(128, 128, 128), metavar=("D", "H", "W"))
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4, 8), help="rows of so many GPUs only")
    parser.add_argument("--kernels", type=Path, help="folder for the kernels of rows of several GPUs")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=540, help="after which no network is begun")
    parser.add_argument("--limit", type=float, default=200, help="seconds until a row must be ready")
    parser.add_argument("--ahead", type=int, default=4, help="networks that get ready side by side")
    parser.add_argument("--threads", type=int, default=1, help="of a compiler; more where few networks get ready")
    parser.add_argument("--cache", type=Path, default=Path("build/inductor"), help="for what is compiled")
    parser.add_argument("--again", action="store_true", help="measure rows that the result has anew")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="narrow networks")
    chosen = parser.parse_args()
    report = {"commands": [], "networks": {}} | read_result(chosen.result)
    report["commands"].append(name_command())
    begin = time.monotonic()
    gpus = count_gpus() if chosen.device == "cuda" else 8
    waiting = list(list_waiting(chosen, report, gpus))
    while waiting and time.monotonic() - begin < chosen.seconds:
        batch, waiting = waiting[: chosen.ahead], waiting[chosen.ahead :]
        for network, name, told in measure_batch(batch, gpus if chosen.device == "cuda" else 1, chosen):
            report["networks"].setdefault(network, {}).setdefault(name_sides(chosen.sides), {})[name] = told
            print(f"{network}, {name}: {describe(told)}", flush=True)
        write(chosen.result, report)
    write(chosen.result, report)
    left = [network for network, _ in waiting]
    print(f"{time.monotonic() - begin:.0f} s; not begun: {', '.join(left) or 'none'}")


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the result, what follows from it, and the plot."""
    report["compared"] = compare(report["networks"])
    write_result(path, **{key: told for key, told in report.items() if key not in ("command", "environment")})
    plot(report["compared"], path.with_suffix(".svg"))


def name_sides(sides: Sequence[int]) -> str:
    """Return the key of a volume's size."""
    return " x ".join(map(str, sides))


def list_waiting(chosen: argparse.Namespace, report: dict[str, Any], gpus: int) -> Iterator[tuple[str, list[Row]]]:
    """Yield networks with those of their rows that are to be measured."""
    for network in chosen.networks:
        done = report["networks"].get(network, {}).get(name_sides(chosen.sides), {})
        rows = [
            {**ROWS[name], "name": name, "network": network, "sides": fit(network, tuple(chosen.sides))}
            | {"small": chosen.small, "device": chosen.device}
            for name in chosen.rows
            if ROWS[name].get("gpus", 1) <= gpus
            if chosen.gpus in (None, ROWS[name].get("gpus", 1))
            if chosen.again or name not in done or LATE in done[name].get("error", "")
        ]
        if rows:
            yield network, rows


def measure_batch(
    batch: Sequence[tuple[str, list[Row]]], gpus: int, chosen: argparse.Namespace
) -> list[tuple[str, str, Row]]:
    """Let the rows of several networks get ready side by side, then measure each GPU's networks one by one.

    Returns
    -------
    list of (network, row, result)
    """
    groups = [[Running(row, number % gpus, chosen) for row in rows] for number, (_, rows) in enumerate(batch)]
    everyone = [one for group in groups for one in group]
    try:
        until = time.monotonic() + chosen.limit
        with ThreadPoolExecutor(os.cpu_count()) as cores:
            list(cores.map(lambda one: one.get_ready(until), everyone))
        single = [[one for one in group if len(one.workers) == 1] for group in groups]
        with ThreadPoolExecutor(gpus) as pool:
            shares = [[group for number, group in enumerate(single) if number % gpus == gpu] for gpu in range(gpus)]
            list(pool.map(lambda share: [take_turns(group, chosen) for group in share], shares))
        for group in groups:
            take_turns([one for one in group if len(one.workers) > 1], chosen)
    finally:
        for one in everyone:
            one.end()
    return [(one.row["network"], one.row["name"], one.tell()) for one in everyone]


def take_turns(group: Sequence["Running"], chosen: argparse.Namespace) -> None:
    """Let the rows of one network run in turns, have those of several GPUs write their kernels, and end them."""
    for _ in range(chosen.turns):
        for one in group:
            one.take_turn()
    for one in group:
        if chosen.kernels is not None and len(one.workers) > 1:
            one.write_kernels(chosen.kernels)
        one.end()


class Running:
    """The processes of a row."""

    def __init__(self, row: Row, gpu: int, chosen: argparse.Namespace) -> None:
        self.row = {**row, "gpu": gpu}
        self.ms: list[float] = []
        self.told: Row = {}
        kept = {"TORCHINDUCTOR_CACHE_DIR": str(chosen.cache.resolve()), "OMP_NUM_THREADS": "1"}
        kept["TORCHINDUCTOR_COMPILE_THREADS"] = str(chosen.threads)
        self.workers = [Worker(WORKER, kept) for _ in range(row.get("gpus", 1))]

    def get_ready(self, until: float) -> None:
        """Wait until the step is built and compiled; a row that is not ready by then is ended."""
        jobs = number_jobs(self.row, len(self.workers))
        self.told = ask(self.workers, jobs, max(0.0, until - time.monotonic()))[0]

    def take_turn(self) -> None:
        """Time some steps: of several processes the slowest counts, or, each by itself, the mean of their speeds."""
        if self.row["kind"] == "exactness" or not (answers := self._ask({"asks": "turn"})):
            return
        each = [answer["ms"] for answer in answers]
        alone = self.row["kind"] == "ours"
        self.ms.append(len(each) / sum(1 / ms for ms in each) if alone else max(each))

    def write_kernels(self, folder: Path) -> None:
        """Have each process write the kernels of two steps into a folder."""
        if not self.ms:  # the processes of exactness have ended
            return
        name = f"{self.row['network']} {self.row['name']} {name_sides(self.row['sides'])}".replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        self._ask({"asks": "kernels", "file": str(folder.resolve() / name)})

    def _ask(self, message: Row) -> list[Row]:
        """Return each process's answer; none where the row has failed, now or before."""
        if "error" in self.told:
            return []
        answers = ask(self.workers, [message] * len(self.workers), 60)
        if "error" in answers[0]:
            self.told = answers[0]
            return []
        return answers

    def tell(self) -> Row:
        """Return what was found: milliseconds of each turn, their median, speed, memory."""
        if not self.ms or "error" in self.told:
            return self.told
        voxels = self.row["sides"][0] * self.row["sides"][1] * self.row["sides"][2] * len(self.workers)
        median = statistics.median(self.ms)
        return self.told | {"ms": median, "ms_of_turns": self.ms, "mvoxel_per_s": voxels / median / 1e3}

    def end(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.end()


def describe(told: Row) -> str:
    """Return a result as one line."""
    if "error" in told:
        return told["error"].partition("\n")[0]
    if "ms" not in told:
        return json.dumps(told)
    memory = f", {told['used_bytes_per_voxel']:.0f} bytes per voxel" if "used_bytes_per_voxel" in told else ""
    return f"{told['ms']:.2f} ms, {told['mvoxel_per_s']:.1f} Mvoxel/s{memory}"


if __name__ == "__main__":
    main()
