"""Kill trainings in every way that a cluster does, start them again, and see that no work was lost; the result is JSON.

python workflows/benchmarks/faults.py --result workflows/benchmarks/results/unet_cpu_faults.json
python workflows/benchmarks/faults.py --only kill --kill 5 --result /tmp/faults.json      # a part of it, quickly

kill       SIGKILL at random moments; `volseg train --restart` until it ends; every bit equals the uninterrupted run
terminate  SIGTERM at random moments: seconds until the process is gone, and seconds of training that were lost
spot       a spot notice from a metadata service (a local HTTP server) likewise
worker     one of four processes is killed: the job goes on by itself, and ends with the weights of an undisturbed job
torchrun   two processes under torchrun, again and again: all of them end with status 0
signals    SIGINT, SIGTERM or SIGHUP at random moments of the first ten seconds of `train`, `predict`, `data check`, in
           which modules are imported: status 128 + number, one line, no traceback, nothing left alive

Trainings run as `volseg` itself, on a synthetic task. Those of one process are forked off this one, which has imported
everything: starting Python and torch would take most of the time, and kills would mostly hit imports. The processes of
`signals` start as a user starts them.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import http.server
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import yaml
from early_signals import NUMBERS, Command, summarise_tries, try_signal

from volseg import cli, experiment  # noqa: F401  (the forked trainings find it imported)
from volseg.checkpointing.state import CLOCKED, TrainingState
from volseg.commands import run_module
from volseg.data.synthetic import make_task
from volseg.errors import CheckpointError
from volseg.monitoring.environment import environment
from volseg.workflow import load_checkpoint

CONFIG = {
    "name": "faults",
    "device": "cpu",
    "preprocessing": [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1.5, 1.5, 1.5]}, {"name": "ZScore"}],
    "split": {"num_folds": 3},
    "patch": {"size": [16, 16, 16], "batch": 4, "foreground": 0.5},
    "network": {"name": "UNet", "channels": [8, 16], "strides": [2], "num_res_units": 1, "dropout": 0.2},
    "optimizer": {"name": "AdamW", "lr": 0.003},
    "training": {"epochs": 3, "iterations": 20, "validate_every": 1, "ema": 0.9, "checkpoint_minutes": 0.002},
}
NAMES = ("latest.pt", "previous.pt", "best.pt")
LIMIT = 300.0
"""Seconds after which a process that should have ended is called hung."""

PHASES = (
    ("checkpoint", ("serialization.py", "files.py")),
    ("validation", ("validation.py", "predictor.py")),
    ("step", ("step.py", "augmented.py", "patches.py", 'training.py", line', "averaging.py")),
)
"""Where a process was, by the files in its traceback; the first that is found. Otherwise it began or ended."""


class Sitting:
    """One start of a training in a process of its own, forked off this one."""

    def __init__(self, arguments: list[str], log: Path, environ: dict[str, str] | None = None) -> None:
        self.log, self.traceback = log, log.with_suffix(".where")
        self.begun = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            _be_training(arguments, log, self.traceback, environ or {})

    def wait(self, seconds: float = LIMIT) -> int | None:
        """Return the exit status as a shell shows it; None while it runs."""
        deadline = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)

    def end(self) -> int:
        """Wait for the end; a process that hangs is killed and told."""
        status = self.wait()
        if status is None:
            where = self.look()
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
            raise SystemExit(
                f"a training hung for {LIMIT} s in {where}; its log:\n{self.log.read_text(encoding='utf-8')[-3000:]}"
            )
        return status

    def look(self) -> str:
        """Return where the process is: it writes its own traceback, without Python's help."""
        self.traceback.write_bytes(b"")
        os.kill(self.pid, signal.SIGUSR2)
        for _ in range(50):
            time.sleep(0.002)
            if text := self.traceback.read_text(encoding="utf-8"):
                break
        else:
            return "start"  # it had not come to install the handler yet
        return next((phase for phase, marks in PHASES if any(mark in text for mark in marks)), "start or end")


def _be_training(arguments: list[str], log: Path, traceback: Path, environ: dict[str, str]) -> None:
    """Be `volseg` with these arguments, in a child of the fork; does not return."""
    status = 70
    try:
        os.setsid()
        os.environ.update(environ)
        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        faulthandler.register(signal.SIGUSR2, file=traceback.open("wb"), all_threads=True)
        sys.argv = ["volseg", *arguments]
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback as printed  # only a training that fails needs it

        printed.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    """Run the parts that were asked for, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    counts = {"kill": 50, "terminate": 20, "spot": 20, "worker": 5, "torchrun": 100, "signals": 200}
    for name, count in counts.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="RUNS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side-by-side", type=int, default=2, help="trainings of one process at a time")
    chosen = parser.parse_args()

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports what optimizers import late, so that no fork does
    result: dict = {"command": shlex.join(["python", *sys.argv]), "environment": environment()}
    with tempfile.TemporaryDirectory(prefix="faults") as place:
        bench = Bench(Path(place), chosen.seed, chosen.side_by_side)
        if chosen.only != ["signals"]:
            result["undisturbed"] = bench.reference()
        for part in chosen.only:
            begin = time.perf_counter()
            result[part] = {**PARTS[part](bench, getattr(chosen, part)), "took_seconds": time.perf_counter() - begin}
            print(part, json.dumps({key: value for key, value in result[part].items() if key != "runs"}), flush=True)
            chosen.result.parent.mkdir(parents=True, exist_ok=True)
            chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    failed = [part for part in chosen.only if not result[part]["all_well"]]
    sys.exit(f"not all well: {', '.join(failed)}" if failed else 0)


class Bench:
    """A task, a config, and the run that nobody disturbs."""

    def __init__(self, place: Path, seed: int, side_by_side: int) -> None:
        self.place, self.side_by_side = place, side_by_side
        self.random = random.Random(seed)  # noqa: S311  (moments, no secrets)
        self.task = make_task(place / "Task00_Synthetic", num_cases=6)
        self.config = self.write_config("config.yaml", {})

    def write_config(self, name: str, training: dict, **more: object) -> Path:
        """Write the config with other values of the training."""
        content = {**CONFIG, **more, "training": {**CONFIG["training"], **training}, "data": {"root": str(self.task)}}
        path = self.place / name
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def start(self, folder: Path, *more: str, environ: dict[str, str] | None = None) -> Sitting:
        """Start, or go on with, the training in ``folder``."""
        arguments = ["train", str(self.config), "--restart", "-o", str(folder), *more]
        return Sitting(arguments, folder.with_suffix(".log"), environ)

    def reference(self) -> dict:
        """Train undisturbed, twice: the second time says that the training repeats itself at all."""
        durations = []
        for name in ("undisturbed", "undisturbed_again"):
            sitting = self.start(self.place / name)
            if sitting.end() != 0:
                raise SystemExit(sitting.log.read_text(encoding="utf-8")[-3000:])
            durations.append(time.monotonic() - sitting.begun)
        self.seconds = min(durations)
        self.weights = fingerprint(load_checkpoint(self.place / "undisturbed" / "checkpoints" / "latest.pt"))
        again = fingerprint(load_checkpoint(self.place / "undisturbed_again" / "checkpoints" / "latest.pt"))
        if self.weights != again:
            raise SystemExit("two undisturbed runs differ: nothing can be compared")
        return {"seconds": durations, "sha256": self.weights}

    def each(self, count: int, run: Callable[[int, random.Random], dict]) -> list[dict]:
        """Run ``run(number, random numbers of its own)`` so many times, some side by side."""
        seeds = [self.random.randrange(2**32) for _ in range(count)]
        with ThreadPoolExecutor(self.side_by_side) as threads:
            return list(threads.map(lambda at: run(at, random.Random(seeds[at])), range(count)))  # noqa: S311

    def is_like_undisturbed(self, folder: Path) -> bool:
        """Compare the last checkpoint's whole state, bit for bit."""
        return fingerprint(load_checkpoint(folder / "checkpoints" / "latest.pt")) == self.weights


def fingerprint(state: TrainingState) -> str:
    """Return a digest of everything that a training goes on from, without the seconds it took."""
    digest = hashlib.sha256()
    content = state.as_checkpoint()
    for name in ("seconds", "metadata"):
        content.pop(name)
    for record in (*content["history"], *([content["best"]] if content["best"] else ())):
        for name in CLOCKED:
            record.pop(name)
    _digest(digest, content)
    return digest.hexdigest()


def _digest(digest: "hashlib._Hash", value: object) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(repr(key).encode())
            _digest(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _digest(digest, item)
    else:
        digest.update(repr(value).encode())


def examine(folder: Path) -> dict:
    """Look at what a killed training left: which checkpoints there are, and which of them cannot be read."""
    faults, found = [], {}
    for name in NAMES:
        path = folder / "checkpoints" / name
        if path.exists():
            try:
                found[name] = load_checkpoint(path).progress
            except CheckpointError as fault:
                faults.append(str(fault))
    return {"progress": max(found.values(), default=None), "faults": faults}


def kill(bench: Bench, count: int) -> dict:
    """Kill by SIGKILL, one to three times a run."""

    def run(number: int, chance: random.Random) -> dict:
        folder = bench.place / f"kill_{number}"
        wheres, faults = [], []
        for _ in range(chance.randint(1, 3)):
            sitting = bench.start(folder)
            status = sitting.wait(chance.uniform(0, bench.seconds))
            if status is not None:  # what was left of it was shorter than that
                break
            wheres.append(sitting.look())
            os.kill(sitting.pid, signal.SIGKILL)
            sitting.wait()
            faults += examine(folder)["faults"]
        status = bench.start(folder).end()
        return {
            "killed_in": wheres,
            "checkpoints_unreadable": faults,
            "status": status,
            "equal": status == 0 and bench.is_like_undisturbed(folder),
            "left_over": sorted(path.name for path in (folder / "checkpoints").glob(".*")),
        }

    runs = bench.each(count, run)
    well = [found["equal"] and not found["checkpoints_unreadable"] and not found["left_over"] for found in runs]
    return {
        "all_well": all(well),
        "runs_equal_to_undisturbed": sum(found["equal"] for found in runs),
        "kills": sum(len(found["killed_in"]) for found in runs),
        "killed_in": Counter(where for found in runs for where in found["killed_in"]),
        "unreadable_checkpoints": sum(len(found["checkpoints_unreadable"]) for found in runs),
        "runs": runs,
    }


def terminate(bench: Bench, count: int) -> dict:
    """End by SIGTERM, then go on to the end."""

    def run(number: int, chance: random.Random) -> dict:
        folder = bench.place / f"terminate_{number}"
        sitting = bench.start(folder)
        # Not in the last tenth: it might be over.
        if sitting.wait(chance.uniform(0.1, 0.9) * bench.seconds) is not None:
            return {"where": "over"}
        return ask_to_stop(bench, folder, sitting, lambda: os.kill(sitting.pid, signal.SIGTERM), bench.weights)

    return summarise(bench.each(count, run))


def ask_to_stop(
    bench: Bench, folder: Path, sitting: Sitting, ask: Callable[[], object], expected: str, more: Sequence[str] = ()
) -> dict:
    """Return how a process stopped that was asked to, and how its training ended after another start.

    Parameters
    ----------
    bench, folder, sitting
        The process, and where it trains.
    ask
        Called once.
    expected
        The fingerprint of the undisturbed run.
    more
        What the command says besides.
    """
    where, before, at = sitting.look(), time.time(), time.monotonic()
    ask()
    status = sitting.end()
    seconds = time.monotonic() - at
    latest = folder / "checkpoints" / "latest.pt"
    # A file written after the request holds all that was done; else what came after it is lost.
    lost = max(0.0, before - latest.stat().st_mtime) if latest.exists() else 0.0
    found = examine(folder)
    last = bench.start(folder, *more).end()
    return {
        "where": where,
        "status": status,
        "seconds_until_gone": seconds,
        "seconds_lost": lost,
        "checkpoints_unreadable": found["faults"],
        "progress": found["progress"],
        "status_at_last": last,
        "equal": last == 0 and fingerprint(load_checkpoint(latest)) == expected,
    }


def summarise(runs: list[dict]) -> dict:
    """Return the worst of runs that were asked to stop."""
    stopped = [run for run in runs if run["where"] != "over"]
    gone = [run["seconds_until_gone"] for run in stopped]
    lost = [run["seconds_lost"] for run in stopped]
    well = [
        run["equal"] and run["status"] == 128 + signal.SIGTERM and not run["checkpoints_unreadable"] for run in stopped
    ]
    return {
        "all_well": all(well) and max(gone) <= 20 and max(lost) <= 5 and len(stopped) > 0.8 * len(runs),
        "stopped": len(stopped),
        "where": Counter(run["where"] for run in stopped),
        "statuses": Counter(run["status"] for run in stopped),
        "runs_equal_to_undisturbed": sum(run["equal"] for run in stopped),
        "seconds_until_gone": {"median": statistics.median(gone), "largest": max(gone)},
        "seconds_lost": {"median": statistics.median(lost), "largest": max(lost)},
        "runs": runs,
    }


def spot(bench: Bench, count: int) -> dict:
    """Announce the end of the machine, and let the training find out by itself."""

    def run(number: int, chance: random.Random) -> dict:
        folder = bench.place / f"spot_{number}"
        with metadata_service() as (address, announce):
            environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": address}
            # Longer, as the service is asked every five seconds only.
            sitting = bench.start(folder, "--set", "training.spot=aws", *LONGER, environ=environ)
            if sitting.wait(chance.uniform(0.5, 2) * bench.seconds) is not None:
                return {"where": "over"}
            return ask_to_stop(bench, folder, sitting, announce, longer, LONGER)

    longest = bench.place / "longer"
    if bench.start(longest, *LONGER).end() != 0:
        raise SystemExit(longest.with_suffix(".log").read_text(encoding="utf-8")[-3000:])
    longer = fingerprint(load_checkpoint(longest / "checkpoints" / "latest.pt"))
    return summarise(bench.each(count, run))


LONGER = ("--set", "training.epochs=6", "--set", "training.iterations=150")


@contextlib.contextmanager
def metadata_service() -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve what a spot instance can ask for; yield the address, and what announces its end."""
    ending = threading.Event()

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._answer(200, b"token")

        def do_GET(self) -> None:
            if ending.is_set() and self.path.endswith("/spot/instance-action"):
                self._answer(200, b'{"action": "terminate", "time": "2030-01-01T00:00:00Z"}')
            else:
                self._answer(404, b"")

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *ignored: object) -> None:
            del ignored

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", ending.set
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def worker(bench: Bench, count: int) -> dict:
    """Kill one of four processes of a job that may start its processes again."""
    config = bench.write_config("four.yaml", {"deterministic": True, "epochs": 4}, parallel={"data": 4})

    def job(folder: Path) -> subprocess.Popen:
        command = run_module("volseg", "train", str(config), "--gpus", "4", "--max-restarts", "2")
        with folder.with_suffix(".log").open("wb") as log:
            return subprocess.Popen([*command, "--restart", "-o", str(folder)], stdout=log, stderr=log)

    calm = bench.place / "calm"
    if job(calm).wait(timeout=LIMIT) != 0:
        raise SystemExit(calm.with_suffix(".log").read_text(encoding="utf-8")[-3000:])
    expected = fingerprint(load_checkpoint(calm / "checkpoints" / "latest.pt"))
    runs = []
    for number in range(count):
        folder = bench.place / f"worker_{number}"
        running = job(folder)
        deadline = time.monotonic() + LIMIT
        while not (folder / "checkpoints" / "latest.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(bench.random.uniform(0, 1))
        victims = children(running.pid)
        victim = bench.random.randrange(len(victims))
        os.kill(victims[victim], signal.SIGKILL)
        begin = time.monotonic()
        status = running.wait(timeout=LIMIT)
        runs.append(
            {
                "killed": victim,
                "processes": len(victims),
                "status": status,
                "seconds_to_the_end": time.monotonic() - begin,
                "equal": status == 0 and fingerprint(load_checkpoint(folder / "checkpoints" / "latest.pt")) == expected,
                "left_over": children_of_group(folder),
            }
        )
    well = [run["equal"] and run["processes"] == 4 and not run["left_over"] for run in runs]
    return {"all_well": all(well), "went_on_to_the_same_bits": sum(run["equal"] for run in runs), "runs": runs}


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return sorted(int(child) for child in text.split())


def children_of_group(folder: Path) -> int:
    """Return how many processes still work for a folder."""
    found = 0
    for commandline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += str(folder).encode() in commandline.read_bytes()
    return found


def torchrun(bench: Bench, count: int) -> dict:
    """Start two processes, train in them, and see how they end."""
    launcher = run_module("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    statuses, seconds, tails = [], [], []
    for number in range(count):
        folder = bench.place / f"torchrun_{number}"
        command = [*launcher, "-m", "volseg", "train", str(bench.config), "-o", str(folder)]
        begin = time.monotonic()
        done = subprocess.run(
            [*command, "--set", "training.epochs=1", "--set", "training.iterations=3"],
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT,
            check=False,
        )
        seconds.append(time.monotonic() - begin)
        statuses.append(done.returncode)
        if done.returncode:
            tails.append(done.stderr[-2000:])
    return {
        "all_well": not any(statuses),
        "statuses": Counter(statuses),
        "median_seconds": statistics.median(seconds),
        "what_failed": tails,
    }


def signals(bench: Bench, count: int) -> dict:
    """Send signals to processes of their own that are about to begin."""
    # Under nohup, or in the background of a script, this process ignores these, and so would those that it starts.
    for ignored in NUMBERS:
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)
    large = make_task(bench.place / "Task01_Large", num_cases=200)  # which takes more than ten seconds
    run = bench.place / "predicts"
    if bench.start(run).end() != 0:
        raise SystemExit(run.with_suffix(".log").read_text(encoding="utf-8")[-3000:])
    endless = ["--set", "training.epochs=100000", "--set", "training.checkpoint_minutes=60"]
    commands = (
        Command("train", lambda folder: [str(bench.config), "-o", str(folder / "run"), "--no-cache", *endless]),
        Command("predict", lambda folder: [str(run), str(large / "imagesTr"), "-o", str(folder / "predictions")]),
        Command("data check", lambda _: [str(large)]),
    )

    def attempt(number: int, chance: random.Random) -> dict:
        folder = bench.place / f"signal_{number}"
        return try_signal(commands[number % 3], NUMBERS[number // 3 % 3], folder, chance)

    return summarise_tries(bench.each(count, attempt))


PARTS = {
    "kill": kill,
    "terminate": terminate,
    "spot": spot,
    "worker": worker,
    "torchrun": torchrun,
    "signals": signals,
}

if __name__ == "__main__":
    main()
