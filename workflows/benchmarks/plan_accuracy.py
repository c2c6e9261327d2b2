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
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from results import make_parser, read_result, write_result
from workers import Row, Worker, ask, count_gpus, number_jobs, serve, take_place


def main() -> None:
    """Measure what was asked for, and write it."""
    parser = make_parser(__doc__)
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
    chosen = parser.parse_args()
    if chosen.compare or chosen.random:
        forecast(chosen)
    elif chosen.result is None:
        parser.error("name the file for the result by --result")
    else:
        measure_all(find_rows(chosen), chosen)


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
    report = read_result(chosen.compare)
    rows = [row for row in report["rows"] if all(words in row["name"] for words in chosen.only)]
    gpu = compared.name_gpu(report)
    report["compared"] = compared.compare(rows, lambda found: print(compared.describe(found), flush=True), gpu)
    report["errors"] = compared.summarise(report["compared"])
    report["choices"] = compared.judge_choices(report["compared"])
    missed = [one for one in report["choices"] if not one["fitted"] or one["over_fastest"] > compared.AS_FAST]
    print(json.dumps(report["errors"] | {"missed": missed}, indent=1))
    print(f"{len(missed)} of {len(report['choices'])} choices are not the fastest way that fits")
    write_result(chosen.compare, indent=None, **report)
    if chosen.plot is not None:
        compared.plot(report["compared"], chosen.plot)


def measure_all(rows: Sequence[Row], chosen: argparse.Namespace) -> None:
    """Measure rows one after another, those of one GPU side by side; write the result after each."""
    earlier = read_result(chosen.result).get("rows", []) if chosen.skip_done else []
    done = [row for row in earlier if "failed" not in row]
    names = {row["name"] for row in done}
    waiting = [row for row in rows if row["name"] not in names]
    pool, begin = Pool(chosen), time.monotonic()
    try:
        for row in pool.measure(waiting, begin + chosen.seconds):
            done.append(row | {"measured_at_s": round(time.monotonic() - begin, 1)})
            print(describe(done[-1]), flush=True)
            write_result(chosen.result, indent=None, rows=done)
    finally:
        pool.end()
    names = {row["name"] for row in done}
    left = [row["name"] for row in waiting if row["name"] not in names]
    write_result(chosen.result, indent=None, rows=done, not_begun=left)
    print(f"{len(done)} configurations, {len(left)} not begun, {time.monotonic() - begin:.0f} s")


def count_gpus_of(row: Row) -> int:
    """Return how many GPUs a configuration takes."""
    return int(row["spatial"] * row["pipeline"])


class Pool:
    """Processes that have imported everything, and measure one configuration each."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.gpus = chosen.gpus or count_gpus()
        self.spare: list[Worker] = []

    def start(self, needed: int) -> None:
        """Start processes ahead, as many as are needed and no more than may wait."""
        while len(self.spare) < min(needed, self.chosen.ahead):
            self.spare.append(Worker(__file__))

    def measure(self, rows: Sequence[Row], until: float, later: int = 0) -> Iterator[Row]:
        """Yield rows as they are done; ``later`` processes more are started for further rows."""
        free, waiting = set(range(self.gpus)), list(rows)
        running: dict[Future[Row], list[int]] = {}
        with ThreadPoolExecutor(self.gpus) as threads:
            while waiting or running:
                self.start(later + sum(row["spatial"] for row in waiting))
                while waiting and time.monotonic() < until and count_gpus_of(waiting[0]) <= len(free):
                    row = waiting.pop(0)
                    taken = sorted(free.pop() for _ in range(count_gpus_of(row)))
                    # A row takes those that have waited longest; this thread starts them, as they end with it.
                    workers = [self.spare.pop(0) if self.spare else Worker(__file__) for _ in range(row["spatial"])]
                    running[threads.submit(self._measure, row, taken, workers)] = taken
                if waiting and count_gpus_of(waiting[0]) > self.gpus:
                    row = waiting.pop(0)
                    yield row | {"failed": f"takes {count_gpus_of(row)} GPUs of {self.gpus}"}
                elif not running:
                    return  # time is up
                else:
                    for ended in wait(running, return_when=FIRST_COMPLETED).done:
                        free |= set(running.pop(ended))
                        yield ended.result()

    def _measure(self, row: Row, gpus: Sequence[int], workers: Sequence[Worker]) -> Row:
        """Return what a configuration gave in as many processes as it takes."""
        begun, jobs = time.monotonic(), number_jobs({"row": row}, len(workers))
        for number, job in enumerate(jobs):
            own = gpus if len(jobs) == 1 else gpus[number : number + 1]
            job["gpus"] = list(own) if self.chosen.device == "cuda" else []
        first, *others = ask(workers, jobs, self.chosen.limit)
        for worker in workers:
            worker.end()
        if "error" in first:
            first = {"failed": f"{first['error']}\n{first.get('trace', first['log'])}"}
        seconds = round(time.monotonic() - begun, 2)
        return row | first | {"wall_s": seconds} | ({"processes": others} if others else {})

    def end(self) -> None:
        """End the processes that wait."""
        for worker in self.spare:
            worker.end()


def answer(messages: Iterator[Row]) -> Iterator[Row]:
    """Import everything, wait for a configuration, measure it, end."""
    import plan_accuracy_rows

    # Whoever asks for these imports them in its first step otherwise, and the step is timed.
    import volseg.experiment.building  # noqa: F401

    for job in messages:
        take_place(job)
        yield plan_accuracy_rows.measure(job["row"], job["gpus"])
        plan_accuracy_rows.wait_for_others()  # who ends first is missed by the others
        return


def describe(row: Row) -> str:
    """Return a row as one line."""
    if "failed" in row:
        return f"{row['name']}: failed: {row['failed'].splitlines()[0][:200]}"
    if "out_of_memory" in row:
        return f"{row['name']}: out of memory"
    used, reserved = (max(row[f"max_memory_{kind}"], default=0) / 2**30 for kind in ("allocated", "reserved"))
    beside = max(row["beside"]["end"], default=0) / 2**30
    memory = f"used {used:.2f} GiB, reserved {reserved:.2f}, beside {beside:.2f}"
    return f"{row['name']}: {memory}, {row['seconds'] * 1e3:.1f} ms ({row['wall_s']} s)"


if __name__ == "__main__":
    if "--worker" in sys.argv:
        serve(answer)
    main()
