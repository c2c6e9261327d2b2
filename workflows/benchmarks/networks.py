"""A training step of twelve networks: plain, compiled, and ours, on one GPU and on two, in turns.

    python workflows/benchmarks/networks.py --result networks.json --seconds 540
    python workflows/benchmarks/networks.py --result networks.json --seconds 540 --gpus 2 --sides 160 320 320

A step is forward, DiceCE, backward and SGD in bfloat16 on one volume (``--sides``, of each GPU). Rows of one network
are measured in turns, so that their ratios are those of one GPU at one time; a row's milliseconds are the median over
its turns. ``--apart`` gives the turns up where two rows do not fit a GPU at a time. Beside them: memory per voxel, and
how far ours is from the plain network in float32.

Each row is a process of its own, for a compiler may hang, or take the process with it: such a row says what went wrong,
and the others go on. Compiling takes minutes of one core, so the processes of several networks (``--ahead``) get ready
side by side, one for each core, and nothing is timed meanwhile; then each GPU is one network's at a time. Modes of the
compiler in one layout make nearly the same kernels: they follow one another, and find in ``--cache`` what is compiled,
as a second call of this program does. Processes that wait give their memory back.

The JSON is rewritten after each network. What it has is not measured again unless it failed for want of time
(``--again`` measures what is asked for in any case); nothing is begun after ``--seconds``. Beside it lies a plot.
``--device cpu --small --sides 32 32 32`` tries everything without a GPU.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any, ClassVar

from networks_listed import NETWORKS, TUNED, fit
from networks_rows import BY_DEFAULT, ROWS, Row, compare, plot

from volseg.files import replacing
from volseg.monitoring.environment import environment

WORKER = Path(__file__).with_name("networks_rows.py")
LATE = "not ready within"


def main() -> None:
    """Measure what was asked for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=TUNED, metavar="NETWORK")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=tuple(ROWS),
        metavar="ROW",
        help="by default without max-autotune, and with all fusions",
    )
    parser.add_argument("--sides", type=int, nargs=3, default=(128, 128, 128), metavar=("D", "H", "W"))
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4, 8), help="rows of so many GPUs only")
    parser.add_argument("--kernels", type=Path, help="folder for the kernels of rows of several GPUs")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=540, help="after which no network is begun")
    parser.add_argument("--limit", type=float, default=200, help="seconds until a row must be ready")
    parser.add_argument("--ahead", type=int, default=4, help="networks that get ready side by side")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="end a row's processes before the next one's begin: for the largest volumes",
    )
    parser.add_argument("--threads", type=int, default=1, help="of a compiler; more where few networks get ready")
    parser.add_argument("--cache", type=Path, default=Path("build/inductor"), help="for what is compiled")
    parser.add_argument("--again", action="store_true", help="measure rows that the result has anew")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="narrow networks")
    chosen = parser.parse_args()
    chosen.rows = chosen.rows or BY_DEFAULT
    if threading.current_thread() is threading.main_thread():  # who ends this program ends its processes with it
        signal.signal(signal.SIGTERM, end_early)
    report = read(chosen)
    begin = time.monotonic()
    waiting = list(list_waiting(chosen, report))
    gpus = count_gpus() if chosen.device == "cuda" else 1
    if chosen.device == "cuda":
        waiting = [(name, [row for row in rows if row.get("gpus", 1) <= gpus]) for name, rows in waiting]
        waiting = [(name, rows) for name, rows in waiting if rows]
    while waiting and time.monotonic() - begin < chosen.seconds:
        batch, waiting = waiting[: chosen.ahead], waiting[chosen.ahead :]
        for network, name, told in measure_batch(batch, gpus, chosen):
            report["networks"].setdefault(network, {}).setdefault(name_sides(chosen.sides), {})[name] = told
            print(f"{network}, {name}: {describe(told)}", flush=True)
        write(chosen.result, report)
    report["environment"] = environment()
    write(chosen.result, report)
    left = [network for network, _ in waiting]
    print(f"{time.monotonic() - begin:.0f} s; not begun: {', '.join(left) or 'none'}")


def end_early(*_: object) -> None:
    """End the processes of all rows, and then this one: whoever waits for an answer is told that none comes."""
    Running.is_over = True
    for one in list(Running.begun):
        one.kill()
    sys.exit(143)


def read(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the result so far, of earlier calls."""
    report: dict[str, Any] = {"commands": [], "environment": {}, "networks": {}}
    if chosen.result.exists():
        report = json.loads(chosen.result.read_text(encoding="utf-8"))
    report["commands"].append(shlex.join(["python", *sys.argv]))
    return report


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the result, what follows from it, and the plot."""
    report["compared"] = compare(report["networks"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(report["compared"], path.with_suffix(".svg"))


def name_sides(sides: Sequence[int]) -> str:
    """Return the key of a volume's size."""
    return " x ".join(map(str, sides))


def list_waiting(chosen: argparse.Namespace, report: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """Yield networks with those of their rows that are to be measured."""
    for network in chosen.networks:
        done = report["networks"].get(network, {}).get(name_sides(chosen.sides), {})
        rows = [
            {**ROWS[name], "name": name, "network": network, "sides": fit(network, tuple(chosen.sides))}
            | {"small": chosen.small, "device": chosen.device}
            for name in chosen.rows
            if chosen.gpus in (None, ROWS[name].get("gpus", 1))
            if chosen.again or name not in done or LATE in done[name].get("error", "")
        ]
        if rows:
            yield network, rows


def count_gpus() -> int:
    """Return how many GPUs there are, without torch: who asks that takes memory of the first."""
    driver = shutil.which("nvidia-smi") or "nvidia-smi"
    listed = subprocess.run([driver, "-L"], capture_output=True, encoding="utf-8", check=True).stdout
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else len(listed.strip().splitlines())


def measure_batch(
    batch: Sequence[tuple[str, list[Row]]], gpus: int, chosen: argparse.Namespace
) -> list[tuple[str, str, Row]]:
    """Let the rows of several networks get ready side by side, then measure each GPU's networks one by one.

    Returns
    -------
    list of (network, row, result)
    """
    limit = time.monotonic() + chosen.limit
    groups = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (_, rows) in enumerate(batch):
            groups.append([Running(row, number % gpus, chosen, Path(scratch)) for row in rows])
        try:
            if chosen.apart:
                for one in (one for group in groups for one in group):
                    one.get_ready(time.monotonic() + chosen.limit)
                    take_turns([one], chosen.turns, chosen.kernels)
                return [(one.row["network"], one.row["name"], one.tell()) for group in groups for one in group]
            lanes = list_lanes([one for group in groups for one in group])
            with ThreadPoolExecutor(os.cpu_count()) as cores:
                list(cores.map(lambda lane: get_ready(lane, limit), lanes))
            single = [[one for one in group if len(one.logs) == 1] for group in groups]
            with ThreadPoolExecutor(gpus) as pool:
                shares = [[group for number, group in enumerate(single) if number % gpus == gpu] for gpu in range(gpus)]
                list(pool.map(lambda share: take_all_turns(share, chosen.turns), shares))
            for group in groups:
                take_turns([one for one in group if len(one.logs) > 1], chosen.turns, chosen.kernels)
        finally:
            for group in groups:
                for one in group:
                    one.end()
    return [(one.row["network"], one.row["name"], one.tell()) for group in groups for one in group]


def list_lanes(everyone: Sequence["Running"]) -> list[list["Running"]]:
    """Return rows that get ready one after another, the longest lanes first: what compiles a network in one layout."""
    lanes: dict[tuple[Any, ...], list[Running]] = {}
    for one in everyone:
        row = one.row
        compiles = "compile" in row or row["kind"] == "compiled"
        lanes.setdefault((row["network"], row.get("channels_last", False)) if compiles else (id(one),), []).append(one)
    return sorted(lanes.values(), key=len, reverse=True)


def get_ready(lane: Sequence["Running"], limit: float) -> None:
    """Let rows get ready one after another."""
    for one in lane:
        one.get_ready(limit)


def take_all_turns(groups: Sequence[Sequence["Running"]], turns: int) -> None:
    """Let one network's rows after another's run."""
    for group in groups:
        take_turns(group, turns)


def take_turns(group: Sequence["Running"], turns: int, kernels: Path | None = None) -> None:
    """Let the rows of one network run in turns, have them write their kernels where that is wanted, and end them."""
    for _ in range(turns):
        for one in group:
            one.take_turn()
    for one in group:
        if kernels is not None:
            one.write_kernels(kernels)
        one.end()


class Running:
    """The processes of a row."""

    is_over: ClassVar[bool] = False
    """Whether this program is being ended: nothing is begun any more."""
    begun: ClassVar[list["Running"]] = []

    def __init__(self, row: Row, gpu: int, chosen: argparse.Namespace, scratch: Path) -> None:
        self.row, self.limit_s = row, chosen.limit
        self.ms: list[float] = []
        self.told: Row = {}
        self.gpu = gpu
        self.kept = {"TORCHINDUCTOR_CACHE_DIR": str(chosen.cache.resolve())}
        self.kept |= {"TORCHINDUCTOR_COMPILE_THREADS": str(chosen.threads), "OMP_NUM_THREADS": "1"}
        count = row.get("gpus", 1)
        self.logs = [(scratch / f"{row['network']} {row['name']} {number}").open("w+b") for number in range(count)]
        self.processes: list[subprocess.Popen[str]] = []
        self.answers: list[Queue[Row]] = [Queue() for _ in self.logs]
        self.listeners: list[threading.Thread] = []

    def _start(self) -> None:
        self.begun.append(self)
        job = self.row | {"gpu": self.gpu, "port": find_port()}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                env=os.environ | self.kept,
            )
            for log in self.logs
        ]
        for number, (process, answers) in enumerate(zip(self.processes, self.answers, strict=True)):
            self.listeners.append(threading.Thread(target=listen, args=(process, answers), daemon=True))
            self.listeners[-1].start()
            self._say(process, json.dumps(job | {"number": number}))

    def get_ready(self, limit: float) -> None:
        """Begin, and wait until the step is built and compiled; a row that is not ready by then is ended."""
        if self.is_over or time.monotonic() >= limit:
            self.told = {"error": f"{LATE} {self.limit_s:.0f} s, and not begun"}
            return
        self._start()
        if self.is_over:  # since
            self.kill()
        answers = self._hear(limit, "ready")
        if answers is not None:
            self.told = answers[0]["ready"]

    def take_turn(self) -> None:
        """Time some steps: of several processes the slowest counts, or, each by itself, the mean of their speeds."""
        if "error" in self.told or self.row["kind"] == "exactness":
            return
        for process in self.processes:
            self._say(process, "turn")
        answers = self._hear(time.monotonic() + 60, "ms")
        if answers is not None:
            each = [answer["ms"] for answer in answers]
            alone = self.row["kind"] == "ours"
            self.ms.append(len(each) / sum(1 / ms for ms in each) if alone else max(each))

    def write_kernels(self, folder: Path) -> None:
        """Have each process write the kernels of two steps into a folder."""
        if not self.ms or "error" in self.told:
            return
        name = f"{self.row['network']} {self.row['name']} {name_sides(self.row['sides'])}".replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        for number, process in enumerate(self.processes):
            self._say(process, f"kernels {folder.resolve() / name}_rank{number}.json.gz")
        self._hear(time.monotonic() + 60, "kernels")

    def _hear(self, limit: float, what: str) -> list[Row] | None:
        """Return each process's answer; None, and the row has failed, where one gives none, or another one."""
        found = []
        for number, answers in enumerate(self.answers):
            try:
                answer = answers.get(timeout=max(0.1, limit - time.monotonic()))
            except Empty:
                answer = {"error": f"{LATE} {self.limit_s:.0f} s" if what == "ready" else "no answer to its turn"}
            if what not in answer:
                if "error" not in answer:
                    answer = {"error": f"its process ended by {self.processes[number].wait()}"}
                self.told = {**answer, "log": self._read_log(number)}
                self.end()
                return None
            found.append(answer)
        return found

    def _say(self, process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `_hear` tells why

    def _read_log(self, number: int) -> str:
        log = self.logs[number]
        log.seek(0)
        return log.read()[-3000:].decode("utf-8", "replace")

    def tell(self) -> Row:
        """Return what was found: milliseconds of each turn, their median, speed, memory."""
        if not self.ms or "error" in self.told:
            return self.told
        voxels = self.row["sides"][0] * self.row["sides"][1] * self.row["sides"][2] * len(self.logs)
        median = statistics.median(self.ms)
        return self.told | {"ms": median, "ms_of_turns": self.ms, "mvoxel_per_s": voxels / median / 1e3}

    def kill(self) -> None:
        """End the processes at once."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def end(self) -> None:
        """End the processes, and close what was opened for them."""
        self.kill()
        for process in self.processes:
            process.wait()
        for listener in self.listeners:
            listener.join()
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # a line that its reader did not live to read
                    pipe.close()
        for log in self.logs:
            log.close()


def listen(process: "subprocess.Popen[str]", answers: "Queue[Row]") -> None:
    """Put down what a process answers; at its end an empty answer."""
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(json.loads(line))
    answers.put({})


def find_port() -> int:
    """Return a port that is free."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
    return port


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
