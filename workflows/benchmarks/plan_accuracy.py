"""What training steps take of one GPU and of two, measured: memory used and reserved, what lies beside, and time.

    python workflows/benchmarks/plan_accuracy.py --result accuracy.json --seconds 240

Sixty configurations (`plan_accuracy_rows.py`), the most telling first, each in a process of its own, so that no
cached block is another's. Two configurations of one GPU run side by side where there are two; those of two GPUs run
alone. Processes are started ahead and have imported everything when their turn comes. The JSON is rewritten after
every configuration, and none is begun after ``--seconds``; ``--skip-done`` goes on with an earlier result.

    python workflows/benchmarks/plan_accuracy.py --compare accuracy.json --plot accuracy.svg
    python workflows/benchmarks/plan_accuracy.py --random 50 --limit-gib 16 > random.json

compares what was measured with what is forecast, which takes no GPU, and writes errors beside the rows; and draws
configurations at random sizes, each run as is forecast to be fastest within a limit, to be measured by ``--rows``.
"""

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def main() -> None:
    """Measure what was asked for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, help="JSON to write")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORDS", help="configurations whose name has these")
    parser.add_argument("--skip-done", action="store_true", help="keep what the result has, and go on")
    parser.add_argument("--seconds", type=float, default=240, help="after which no configuration is begun")
    parser.add_argument("--limit", type=float, default=110, help="seconds for one configuration")
    parser.add_argument("--gpus", type=int, help="default all that are visible")
    parser.add_argument("--ahead", type=int, default=10, help="processes that wait for their turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=Path, help="JSON list of configurations instead of the script's own")
    parser.add_argument("--compare", type=Path, metavar="RESULT", help="forecast what this result measured")
    parser.add_argument("--plot", type=Path, help="SVG to draw of the comparison")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="print random configurations as JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the random ones")
    parser.add_argument("--limit-gib", type=float, default=16, help="of each GPU, for the random ones")
    parser.add_argument("--one-gpu", action="store_true", help="the configurations of one GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return work()
    if chosen.compare or chosen.random:
        return forecast(chosen)
    rows = find_rows(chosen)
    if chosen.result is None:
        parser.error("name the file for the result by --result")
    return measure_all(rows, chosen)


def find_rows(chosen: argparse.Namespace) -> list[Row]:
    """Return the configurations that were asked for."""
    # It imports torch: a worker does so by itself, and this program needs the list only.
    from plan_accuracy_rows import list_one_gpu_rows, list_rows, name_row

    own = list_one_gpu_rows if chosen.one_gpu else list_rows
    rows = json.loads(chosen.rows.read_text(encoding="utf-8")) if chosen.rows else own()
    rows = [{"name": name_row(row), **row} for row in rows]
    return [row for row in rows if all(words in row["name"] for words in chosen.only)]


def forecast(chosen: argparse.Namespace) -> None:
    """Compare a result with what is forecast of its rows, or print random configurations."""
    # They import torch and volseg.
    import plan_accuracy_compared as compared

    if chosen.random:
        print(json.dumps(list(compared.draw_random(chosen.random, chosen.limit_gib, chosen.seed))))
        return
    report = json.loads(chosen.compare.read_text(encoding="utf-8"))
    rows = [row for row in report["rows"] if all(words in row["name"] for words in chosen.only)]
    gpu = compared.name_gpu(report)
    report["compared"] = compared.compare(rows, lambda found: print(compared.describe(found), flush=True), gpu)
    report["errors"] = compared.summarise(report["compared"])
    report["choices"] = compared.judge_choices(report["compared"])
    sound = [one for one in report["choices"] if one["fitted"] and one["over_fastest"] <= compared.AS_FAST]
    print(json.dumps(report["errors"], indent=1))
    print(f"{len(sound)} of {len(report['choices'])} choices are the fastest way that fits")
    write(report, chosen.compare)
    if chosen.plot is not None:
        compared.plot(report["compared"], chosen.plot)


ENVIRONMENT = "import json; from volseg.monitoring.environment import environment; print(json.dumps(environment()))"


def measure_all(rows: Sequence[Row], chosen: argparse.Namespace) -> None:
    """Measure rows one after another, those of one GPU side by side; write the result after each."""
    done: list[Row] = []
    if chosen.skip_done and chosen.result.exists():
        done = [row for row in json.loads(chosen.result.read_text(encoding="utf-8"))["rows"] if "failed" not in row]
    names = {row["name"] for row in done}
    waiting = [row for row in rows if row["name"] not in names]
    report: Row = {"command": shlex.join(["python", *sys.argv]), "environment": None, "rows": done}
    # In a process of its own, which ends: who asks torch about GPUs takes memory of the first.
    asked = subprocess.Popen([sys.executable, "-c", ENVIRONMENT], stdout=subprocess.PIPE, encoding="utf-8")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        pool = Pool(chosen, Path(scratch), sum(count_processes(row) for row in waiting))
        try:
            for row in pool.measure(waiting, begin + chosen.seconds):
                done.append(row | {"measured_at_s": round(time.monotonic() - begin, 1)})
                report["environment"] = report["environment"] or json.loads(asked.communicate()[0])
                print(describe(done[-1]), flush=True)
                write(report, chosen.result)
        finally:
            pool.end()
    report["not_begun"] = [row["name"] for row in waiting[len(done) - len(names) :]]
    write(report, chosen.result)
    print(f"{len(done)} configurations, {len(report['not_begun'])} not begun, {time.monotonic() - begin:.0f} s")


def count_processes(row: Row) -> int:
    """Return how many processes a configuration takes."""
    return row["spatial"]


def count_gpus(row: Row) -> int:
    """Return how many GPUs a configuration takes."""
    return row["spatial"] * row["pipeline"]


class Pool:
    """Processes that have imported everything, and measure one configuration each."""

    def __init__(self, chosen: argparse.Namespace, scratch: Path, needed: int) -> None:
        self.chosen, self.scratch, self.needed = chosen, scratch, needed
        self.waiting: list[subprocess.Popen[str]] = []
        self.running: dict[int, tuple[Row, list[subprocess.Popen[str]], list[int], float]] = {}
        self.gpus = chosen.gpus or count_visible()
        self.started = 0

    def measure(self, rows: Sequence[Row], until: float) -> Iterator[Row]:
        """Yield rows as they are done."""
        free, left = set(range(self.gpus)), list(rows)
        while left or self.running:
            self._start_ahead()
            while left and time.monotonic() < until and count_gpus(left[0]) <= len(free):
                taken = [free.pop() for _ in range(count_gpus(left[0]))]
                self._begin(left.pop(0), sorted(taken))
            if left and count_gpus(left[0]) > self.gpus:
                row = left.pop(0)
                yield row | {"failed": f"takes {count_gpus(row)} GPUs of {self.gpus}"}
                continue
            if not self.running:
                return  # time is up
            for key in list(self.running):
                row, processes, taken, begun = self.running[key]
                if (result := self._look(row, processes, begun)) is not None:
                    del self.running[key]
                    free |= set(taken)
                    yield result
            time.sleep(0.02)

    def _start_ahead(self) -> None:
        while len(self.waiting) < self.chosen.ahead and self.started < self.needed:
            log = (self.scratch / f"log{self.started}").open("w+", encoding="utf-8")
            command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, encoding="utf-8")
            process.log = log  # type: ignore[attr-defined]
            self.waiting.append(process)
            self.started += 1

    def _begin(self, row: Row, gpus: Sequence[int]) -> None:
        """Hand a configuration to as many processes as it takes."""
        count = count_processes(row)
        self.needed = max(self.needed, self.started + count - len(self.waiting))
        while len(self.waiting) < count:
            self._start_ahead()
        processes = [self.waiting.pop(0) for _ in range(count)]
        with socket.socket() as asked:
            asked.bind(("127.0.0.1", 0))
            port = asked.getsockname()[1]
        for number, process in enumerate(processes):
            own = [] if self.chosen.device == "cpu" else [gpus[number]] if count > 1 else list(gpus)
            job = {"row": row, "number": number, "processes": count, "port": port, "gpus": own}
            process.result = job["result"] = str(self.scratch / f"result {process.pid}")  # type: ignore[attr-defined]
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended: `_look` tells why
        self.running[processes[0].pid] = (row, processes, list(gpus), time.monotonic())

    def _look(self, row: Row, processes: Sequence["subprocess.Popen[str]"], begun: float) -> Row | None:
        """Return what a configuration gave, once it has ended or its time is up."""
        late = time.monotonic() - begun > self.chosen.limit
        ended = [process.poll() is not None for process in processes]
        failed = [process for process in processes if process.poll() is not None and read_result(process) is None]
        # Who is out of memory is waited for by the others, in an exchange that it does not come to any more.
        full = [process for process in processes if "out_of_memory" in (read_result(process) or {})]
        if not (all(ended) or failed or full or late):
            return None
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        seconds = round(time.monotonic() - begun, 2)
        if full:
            return row | (read_result(full[0]) or {}) | {"wall_s": seconds}
        if failed or late:
            told = "\n".join(read_log(process) for process in failed or processes)
            why = f"no result within {self.chosen.limit} s" if late else "a process failed"
            return row | {"failed": f"{why}:\n{told[-3000:]}", "wall_s": seconds}
        first, *others = [read_result(process) or {} for process in processes]
        return row | first | {"wall_s": seconds} | ({"processes": others} if others else {})

    def end(self) -> None:
        """End the processes that are left."""
        for process in [*self.waiting, *(one for _, group, _, _ in self.running.values() for one in group)]:
            if process.poll() is None:
                process.kill()
            process.wait()


def read_result(process: Any) -> Row | None:
    """Return what a process found; None where it wrote nothing."""
    path = Path(process.result)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_log(process: Any) -> str:
    """Return the end of what a process printed beside its result."""
    process.log.seek(0)
    return process.log.read()[-1500:]


def work() -> None:
    """Import everything, wait for a configuration, measure it, write the result, end."""
    import plan_accuracy_rows

    # Whoever asks for these imports them in its first step otherwise, and the step is timed.
    import volseg.experiment.building  # noqa: F401

    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # the parent has ended
    job = json.loads(line)
    plan_accuracy_rows.take_place(job["number"], job["processes"], job["port"])
    try:
        found = plan_accuracy_rows.measure(job["row"], job["gpus"])
        replace_by(Path(job["result"]), json.dumps(found).encode())
        plan_accuracy_rows.wait_for_others()  # who ends first is missed by the others
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # Not the interpreter's own end: NCCL waits there for recordings that are still alive.
    os._exit(0)


def count_visible() -> int:
    """Return how many GPUs there are for this program, without torch; one where there is no driver."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    if shutil.which("nvidia-smi") is None:
        return 1
    command = ["nvidia-smi", "--list-gpus"]
    return len(subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.splitlines())


def write(report: Row, path: Path) -> None:
    """Write what there is."""
    replace_by(path, (json.dumps(report) + "\n").encode())  # half as large as with a line for each number


def replace_by(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)


def describe(row: Row) -> str:
    """Return a row as one line."""
    if "failed" in row:
        return f"{row['name']}: failed: {row['failed'].strip().splitlines()[-1][:200]}"
    if "out_of_memory" in row:
        return f"{row['name']}: out of memory"
    used, reserved = (max(row[f"max_memory_{kind}"], default=0) / 2**30 for kind in ("allocated", "reserved"))
    beside = max(row["beside"]["end"], default=0) / 2**30
    memory = f"used {used:.2f} GiB, reserved {reserved:.2f}, beside {beside:.2f}"
    return f"{row['name']}: {memory}, {row['seconds'] * 1e3:.1f} ms ({row['wall_s']} s)"


if __name__ == "__main__":
    main()
