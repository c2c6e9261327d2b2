"""Send signals to commands in their first ten seconds, while they import modules; a part of `faults`."""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from volseg.commands import run_module

__all__ = ["NUMBERS", "summarise_tries", "try_signal"]

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FIRST_SECONDS = 10.0
LIMIT = 60.0
"""Seconds after a signal until a process counts as hung, on a busy machine too."""
SECONDS_TO_FOLLOW = 10.0
"""Time for the child processes of an ended process to end."""

MARKS = (("libtorch_cpu", "with torch"), ("_multiarray_umath", "with numpy"))
"""How far the imports are, by the libraries in the process's memory; the first match counts."""


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
            return {"where": "over"}
        where = _look(process.pid)
        process.send_signal(number)
        begin = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT)
        gone = time.monotonic() - begin
    hung = process.poll() is None
    left = _end_left(process.pid)
    process.wait()
    errors = (folder / "err").read_text(encoding="utf-8", errors="replace")
    lines = errors.count("volseg: interrupted")
    by_signal = process.returncode == -number  # before the first statement of volseg
    well = (process.returncode == 128 + number and lines == 1) or (by_signal and lines == 0)
    well = well and not hung and not left and "Traceback" not in errors
    # Python handles Ctrl-C itself in its first hundredths of a second, before it runs a line of volseg.
    in_python_start = "KeyboardInterrupt" in errors and "/volseg/" not in errors
    return {
        "verb": verb,
        "signal": number.name,
        "start": "-m" if start is module else "script",
        "moment": moment,
        "where": where,
        "status": process.returncode,
        "seconds_until_gone": gone,
        "hung": hung,
        "left_alive": left,
        "in_python_start": in_python_start,
        "well": well,
        "errors": errors[-3000:],
    }


def _look(pid: int) -> str:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return "gone"
    return next((words for mark, words in MARKS if mark in maps), "before numpy")


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


def summarise_tries(runs: Sequence[dict]) -> dict:
    """Return counts by verb and signal, and the failed tries; a process that ended before its signal is no try."""
    tries = [run for run in runs if run["where"] != "over"]
    gone = [run["seconds_until_gone"] for run in tries]
    wrong = [run for run in tries if not run["well"]]
    pairs = Counter((run["verb"], run["signal"]) for run in tries)
    failed = Counter((run["verb"], run["signal"]) for run in wrong)
    return {
        "all_well": all(run["in_python_start"] for run in wrong) and len(tries) > 0.8 * len(runs),
        "tries": len(tries),
        "well": len(tries) - len(wrong),
        "by_verb_and_signal": {
            f"{verb}, {name}": f"{count - failed[verb, name]} of {count}"
            for (verb, name), count in sorted(pairs.items())
        },
        "where": Counter(run["where"] for run in tries),
        "statuses": Counter(str(run["status"]) for run in tries),
        "seconds_until_gone": {"median": statistics.median(gone), "largest": max(gone)},
        "not_well": wrong,
    }
