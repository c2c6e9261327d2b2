"""Kill trainings in every way that a cluster does, restart them, and check that no work is lost.

python workflows/benchmarks/faults.py --result workflows/benchmarks/results/unet_cpu_faults.json
python workflows/benchmarks/faults.py --only kill --kill 5 --result /tmp/faults.json      # a part of it, quickly

kill       SIGKILL at random moments; `volseg train --restart` until it ends; every bit equals the undisturbed run
terminate  SIGTERM at random moments: seconds until the process is gone, and seconds of training that were lost
spot       a spot notice from a metadata service (a local HTTP server) in place of SIGTERM
worker     one of four processes is killed: the job continues by itself, and ends with the weights of an undisturbed job
torchrun   two processes under torchrun, many times: all of them end with status 0
signals    SIGINT, SIGTERM or SIGHUP at random moments of the first ten seconds of `train`, `predict`, `data check`,
           while modules are imported: status 128 + number, one line, no traceback, no process left

Trainings run on a synthetic task. Those of one process are forked from this one, which has imported everything: the
start of Python and torch would take most of the time, and kills would mostly hit imports. The processes of `signals`
start as a user starts them.

The result is JSON: a list of sittings, to which each call of this script adds one. A sitting holds counts, and the runs
that failed.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import yaml
from results import make_parser, name_command, read_environment, read_result, write_result

from volseg import cli, experiment  # noqa: F401  (the forked trainings find it imported)
from volseg.checkpointing.state import CLOCKED
from volseg.commands import run_module
from volseg.data.synthetic import make_task
from volseg.errors import CheckpointError
from volseg.workflow import load_checkpoint

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from spot_service import serving

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
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NAMES = ("latest.pt", "previous.pt", "best.pt")
LIMIT = 300.0
"""Seconds after which a process that should have ended is called hung."""
FIRST_SECONDS = 10.0
"""Of a command, in which signals are sent to it while it imports modules."""
SECONDS_TO_FOLLOW = 10.0
"""Time for the child processes of an ended process to end."""


FORKING = multiprocessing.get_context("fork")


class Sitting:
    """A training in a process of its own, forked from this one."""

    def __init__(self, arguments: list[str], log: Path, environ: dict[str, str] | None = None) -> None:
        self.log = log
        self._process = FORKING.Process(target=_train, args=(arguments, log, environ or {}))
        self._process.start()

    def wait(self, seconds: float = LIMIT) -> int | None:
        """Return the exit status as a shell shows it; None while it runs."""
        deadline = time.monotonic() + seconds
        # Not `join`: forks of other threads hold the pipe that it waits on, and outlive the training.
        while (code := self._process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> int:
        """Return the exit status; kill a process that hangs, and end the benchmark."""
        status = self.wait()
        if status is None:
            self.kill()
            raise SystemExit(f"a training hung for {LIMIT} s; its log:\n{read_tail(self.log)}")
        return status

    def stop(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self.wait()


def read_tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(encoding="utf-8")[-3000:]


def _train(arguments: list[str], log: Path, environ: dict[str, str]) -> None:
    """Run `volseg` with these arguments in the forked process."""
    os.setsid()
    os.environ.update(environ)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["volseg", *arguments]
    status = 70
    try:
        cli.main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # as Python ends, it would wait for the threads of the pool that it was forked from


def main() -> None:
    """Run the chosen parts, and write their results."""
    parser = make_parser(__doc__)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="RUNS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at the same time")
    chosen = parser.parse_args()

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports what optimizers import late, so that no fork does
    result: dict = {"command": name_command(), "environment": read_environment()}
    earlier = read_result(chosen.result).get("sittings", [])
    with tempfile.TemporaryDirectory(prefix="faults") as place:
        bench = Bench(Path(place), chosen.seed, chosen.side_by_side)
        if chosen.only != ["signals"]:
            result["undisturbed"] = bench.reference()
        for part in chosen.only:
            begin = time.perf_counter()
            result[part] = PARTS[part][0](bench, getattr(chosen, part))
            result[part]["took_seconds"] = time.perf_counter() - begin
            print(part, json.dumps(result[part]), flush=True)
            write_result(chosen.result, sittings=[*earlier, result])
    failed = [part for part in chosen.only if not result[part]["all_well"]]
    sys.exit(f"not all well: {', '.join(failed)}" if failed else 0)


class Bench:
    """A task, a config, and the undisturbed run."""

    def __init__(self, place: Path, seed: int, side_by_side: int) -> None:
        self.place, self.side_by_side = place, side_by_side
        self.random = random.Random(seed)  # noqa: S311  (moments, no secrets)
        self.task = make_task(place / "Task00_Synthetic", num_cases=6)
        self.config = self.write_config("config.yaml", {})

    def write_config(self, name: str, training: dict, **more: object) -> Path:
        """Write the config with changed values."""
        content = {**CONFIG, **more, "training": {**CONFIG["training"], **training}, "data": {"root": str(self.task)}}
        path = self.place / name
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def start(self, folder: Path, *more: str, environ: dict[str, str] | None = None) -> Sitting:
        """Start or continue the training in ``folder``."""
        arguments = ["train", str(self.config), "--restart", "-o", str(folder), *more]
        return Sitting(arguments, folder.with_suffix(".log"), environ)

    def finish(self, folder: Path, *more: str) -> str:
        """Train undisturbed; return the fingerprint."""
        sitting = self.start(folder, *more)
        if sitting.end() != 0:
            raise SystemExit(read_tail(sitting.log))
        return fingerprint(folder)

    def reference(self) -> dict:
        """Train undisturbed twice: only if both are equal can interrupted runs be compared."""
        durations, found = [], set()
        for name in ("undisturbed", "undisturbed_again"):
            begun = time.monotonic()
            found.add(self.finish(self.place / name))
            durations.append(time.monotonic() - begun)
        self.seconds = min(durations)
        if len(found) > 1:
            raise SystemExit("two undisturbed runs differ: nothing can be compared")
        [self.weights] = found
        return {"seconds": durations, "sha256": self.weights}

    def each(self, count: int, run: Callable[[int, random.Random], dict]) -> list[dict]:
        """Call ``run(number, random generator)`` so many times, some at the same time."""
        seeds = [self.random.randrange(2**32) for _ in range(count)]
        with ThreadPoolExecutor(self.side_by_side) as threads:
            return list(threads.map(lambda at: run(at, random.Random(seeds[at])), range(count)))  # noqa: S311


def fingerprint(folder: Path) -> str:
    """Return a digest of everything from which a run's training continues, without the seconds it took."""
    digest = hashlib.sha256()
    content = load_checkpoint(folder / "checkpoints" / "latest.pt").as_checkpoint()
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
    """Return the progress of a killed training, and which of its checkpoints cannot be read."""
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
    """Kill each run by SIGKILL, one to three times."""

    def run(number: int, chance: random.Random) -> dict:
        folder = bench.place / f"kill_{number}"
        kills, faults = 0, []
        for _ in range(chance.randint(1, 3)):
            sitting = bench.start(folder)
            status = sitting.wait(chance.uniform(0, bench.seconds))
            if status is not None:  # it ended before
                break
            sitting.kill()
            kills += 1
            faults += examine(folder)["faults"]
        status = bench.start(folder).end()
        equal = status == 0 and fingerprint(folder) == bench.weights
        left_over = sorted(path.name for path in (folder / "checkpoints").glob(".*"))
        return {
            "kills": kills,
            "checkpoints_unreadable": faults,
            "status": status,
            "equal": equal,
            "left_over": left_over,
            "well": equal and not faults and not left_over,
        }

    runs = bench.each(count, run)
    kills = sum(found["kills"] for found in runs)
    return summarise(runs, kills=kills, unreadable=sum(len(found["checkpoints_unreadable"]) for found in runs))


def summarise(runs: Sequence[dict], *spread: str, **more: object) -> dict:
    """Return counts, the median and largest of each ``spread``, and the failed runs.

    A run that was over before anything was done to it does not count.
    """
    tried = [run for run in runs if "over" not in run]
    wrong = [run for run in tried if not run["well"]]
    told: dict = {
        "all_well": not wrong and len(tried) > 0.8 * len(runs),
        "runs": len(tried),
        "statuses": Counter(str(run["status"]) for run in tried),
    }
    if equal := [run["equal"] for run in tried if "equal" in run]:
        told["runs_equal_to_undisturbed"] = sum(equal)
    for name in spread:
        seconds = [run[name] for run in tried]
        told[name] = {"median": statistics.median(seconds), "largest": max(seconds)}
    return {**told, **more, "not_well": wrong}


def terminate(bench: Bench, count: int) -> dict:
    """Stop each run by SIGTERM, then continue it to its end."""

    def run(number: int, chance: random.Random) -> dict:
        folder = bench.place / f"terminate_{number}"
        sitting = bench.start(folder)
        # Not in the last tenth: it might have ended.
        if sitting.wait(chance.uniform(0.1, 0.9) * bench.seconds) is not None:
            return {"over": True}
        return ask_to_stop(bench, folder, sitting, sitting.stop, bench.weights)

    return summarise(bench.each(count, run), "seconds_until_gone", "seconds_lost")


def ask_to_stop(
    bench: Bench, folder: Path, sitting: Sitting, ask: Callable[[], object], expected: str, more: Sequence[str] = ()
) -> dict:
    """Return how a process stops when asked to, and how its training ends after a restart."""
    before, at = time.time(), time.monotonic()
    ask()
    status = sitting.end()
    seconds = time.monotonic() - at
    latest = folder / "checkpoints" / "latest.pt"
    # A checkpoint written after the request holds all work; else the work since the last one is lost.
    lost = max(0.0, before - latest.stat().st_mtime) if latest.exists() else 0.0
    found = examine(folder)
    last = bench.start(folder, *more).end()
    equal = last == 0 and fingerprint(folder) == expected
    return {
        "status": status,
        "seconds_until_gone": seconds,
        "seconds_lost": lost,
        "checkpoints_unreadable": found["faults"],
        "progress": found["progress"],
        "status_at_last": last,
        "equal": equal,
        "well": equal and status == 128 + signal.SIGTERM and not found["faults"] and seconds <= 20 and lost <= 5,
    }


def spot(bench: Bench, count: int) -> dict:
    """Announce the end of the machine by its metadata service."""

    def run(number: int, chance: random.Random) -> dict:
        folder = bench.place / f"spot_{number}"
        with serving() as service:
            environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.endpoint}
            # Longer, because the service is asked only every five seconds.
            sitting = bench.start(folder, "--set", "training.spot=aws", *LONGER, environ=environ)
            if sitting.wait(chance.uniform(0.5, 2) * bench.seconds) is not None:
                return {"over": True}
            return ask_to_stop(bench, folder, sitting, lambda: setattr(service, "notice", NOTICE), longer, LONGER)

    longer = bench.finish(bench.place / "longer", *LONGER)
    return summarise(bench.each(count, run), "seconds_until_gone", "seconds_lost")


NOTICE = json.dumps({"action": "terminate", "time": "2030-01-01T00:00:00Z"})

LONGER = ("--set", "training.epochs=6", "--set", "training.iterations=150")


def worker(bench: Bench, count: int) -> dict:
    """Kill one of four processes of a job with restarts."""
    config = bench.write_config("four.yaml", {"deterministic": True, "epochs": 4}, parallel={"data": 4})

    def job(folder: Path) -> subprocess.Popen:
        command = run_module("volseg", "train", str(config), "--gpus", "4", "--max-restarts", "2")
        with folder.with_suffix(".log").open("wb") as log:
            return subprocess.Popen([*command, "--restart", "-o", str(folder)], stdout=log, stderr=log)

    calm = bench.place / "calm"
    if job(calm).wait(timeout=LIMIT) != 0:
        raise SystemExit(read_tail(calm.with_suffix(".log")))
    expected = fingerprint(calm)
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
        seconds = time.monotonic() - begin
        equal = status == 0 and fingerprint(folder) == expected
        left_over = children_of_group(folder)
        runs.append(
            {
                "killed": victim,
                "processes": len(victims),
                "status": status,
                "seconds_to_the_end": seconds,
                "equal": equal,
                "left_over": left_over,
                "well": equal and len(victims) == 4 and not left_over,
            }
        )
    return summarise(runs, "seconds_to_the_end")


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return sorted(int(child) for child in text.split())


def children_of_group(folder: Path) -> int:
    """Return the number of processes that still train in a folder."""
    found = 0
    for commandline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found += str(folder).encode() in commandline.read_bytes()
    return found


def torchrun(bench: Bench, count: int) -> dict:
    """Train in two processes, and count their exit statuses."""
    launcher = run_module("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    short = ["--set", "training.epochs=1", "--set", "training.iterations=3"]
    runs = []
    for number in range(count):
        folder = bench.place / f"torchrun_{number}"
        command = [*launcher, "-m", "volseg", "train", str(bench.config), "-o", str(folder), *short]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=LIMIT, check=False)
        well, seconds = done.returncode == 0, time.monotonic() - begin
        runs.append({"status": done.returncode, "seconds": seconds, "well": well, "errors": done.stderr[-2000:]})
    return summarise(runs, "seconds")


def signals(bench: Bench, count: int) -> dict:
    """Send signals to commands in their first seconds."""
    # Under nohup, or in the background of a script, this process ignores signals, and its children would too.
    for ignored in NUMBERS:
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)
    large = make_task(bench.place / "Task01_Large", num_cases=200)  # takes more than ten seconds
    run = bench.place / "predicts"
    bench.finish(run)
    endless = ["--set", "training.epochs=100000", "--set", "training.checkpoint_minutes=60"]

    def attempt(number: int, chance: random.Random) -> dict:
        folder = bench.place / f"signal_{number}"
        verb, arguments = (
            ("train", [str(bench.config), "-o", str(folder / "run"), "--no-cache", *endless]),
            ("predict", [str(run), str(large / "imagesTr"), "-o", str(folder / "predictions")]),
            ("data check", [str(large)]),
        )[number % 3]
        return try_signal(verb, arguments, NUMBERS[number // 3 % 3], folder, chance)

    runs = bench.each(count, attempt)
    found = summarise(runs, "seconds_until_gone")
    pairs = Counter(f"{run['verb']}, {run['signal']}" for run in runs if "over" not in run)
    failed = Counter(f"{run['verb']}, {run['signal']}" for run in found["not_well"])
    # Python handles Ctrl-C itself in its first hundredths of a second, before it runs a line of volseg.
    early = all("KeyboardInterrupt" in run["errors"] and "/volseg/" not in run["errors"] for run in found["not_well"])
    found["all_well"] = early and found["runs"] > 0.8 * len(runs)
    return found | {"well": {name: f"{pairs[name] - failed[name]} of {pairs[name]}" for name in sorted(pairs)}}


def try_signal(
    verb: str, arguments: Sequence[str], number: signal.Signals, folder: Path, chance: random.Random
) -> dict:
    """Send a signal at a random moment of a command's first ten seconds; return how the process ends."""
    folder.mkdir()
    module = run_module("volseg")
    start = module if chance.random() < 0.5 else [str(Path(sys.executable).with_name("volseg"))]
    moment = chance.uniform(0, FIRST_SECONDS)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [*start, *verb.split(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # to find its child processes
        )
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            pass
        else:
            return {"over": True}
        process.send_signal(number)
        begin = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)  # on a busy machine too
        gone = time.monotonic() - begin
    hung = process.poll() is None
    left = _end_left(process.pid)
    process.wait()
    errors = (folder / "err").read_text(encoding="utf-8", errors="replace")
    lines = errors.count("volseg: interrupted")
    by_signal = process.returncode == -number  # before the first statement of volseg
    well = (process.returncode == 128 + number and lines == 1) or (by_signal and lines == 0)
    well = well and not hung and not left and "Traceback" not in errors
    return {
        "verb": verb,
        "signal": number.name,
        "start": "-m" if start is module else "script",
        "moment": moment,
        "status": process.returncode,
        "seconds_until_gone": gone,
        "hung": hung,
        "left_alive": left,
        "well": well,
        "errors": errors[-3000:],
    }


def _end_left(session: int) -> int:
    """Return how many processes of a session outlive its leader, and kill them."""
    end = time.monotonic() + SECONDS_TO_FOLLOW
    while (left := [pid for pid in _list_session(session) if pid != session]) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in {*left, *_list_session(session)}:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def _list_session(session: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session and fields[0] not in (b"Z", b"X"):
            yield int(folder.name)


PARTS = {
    "kill": (kill, 50),
    "terminate": (terminate, 20),
    "spot": (spot, 20),
    "worker": (worker, 5),
    "torchrun": (torchrun, 100),
    "signals": (signals, 200),
}
"""Each part, and how many runs it has by default."""

if __name__ == "__main__":
    main()
