"""Signals to commands in their first ten seconds, most of which go by in imports; a part of `faults`."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from volseg.commands import run_module

__all__ = ["Command", "summarise_tries", "try_signal"]

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FIRST_SECONDS = 10.0
LIMIT = 60.0
"""Seconds after which a process that got a signal is called hung; the machine may be busy."""
SECONDS_TO_FOLLOW = 10.0
"""For what a process has started to end behind it."""

MARKS = (("libtorch_cpu", "with torch"), ("_multiarray_umath", "with numpy"), ("libpython", "before numpy"))
"""How far the imports are, by libraries in the process's memory; the first that is found."""


@dataclass(frozen=True)
class Command:
    """What is started again and again, each time in a new folder."""

    verb: str
    arguments: Callable[[Path], Sequence[str]]


def try_signal(command: Command, number: signal.Signals, folder: Path, chance: random.Random) -> dict:
    """Send a signal at a random moment of the first ten seconds; return what came of it.

    Parameters
    ----------
    command, number
        Who gets what.
    folder
        Of this try; the process writes there only.
    chance
        Chooses the moment, and whether the process is the script or ``python -m``.
    """
    folder.mkdir()
    module = run_module("volseg")
    start = module if chance.random() < 0.5 else [str(Path(sys.executable).with_name("volseg"))]
    moment = chance.uniform(0, FIRST_SECONDS)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [*start, *command.verb.split(), *command.arguments(folder)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # whose number finds what it has started
        )
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            pass
        else:
            return {"verb": command.verb, "signal": number.name, "where": "over", "moment": moment}
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
    told = errors.count("volseg: interrupted")
    by_signal = process.returncode == -number  # Python, or the system, before the first statement of volseg
    well = (process.returncode == 128 + number and told == 1) or (by_signal and told == 0)
    well = well and not hung and not left and "Traceback" not in errors
    return {
        "verb": command.verb,
        "signal": number.name,
        "start": "-m" if start is module else "script",
        "moment": moment,
        "where": where,
        "status": process.returncode,
        "seconds_until_gone": gone,
        "hung": hung,
        "left_alive": left,
        "traceback": "Traceback" in errors,
        # Python's own handler of Ctrl-C, in its first hundredths of a second, before it runs a line of volseg.
        "in_python_start": "KeyboardInterrupt" in errors and "/volseg/" not in errors,
        "well": well,
        "errors": "" if well else errors[-3000:],
    }


def _look(pid: int) -> str:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return "gone"
    return next((words for mark, words in MARKS if mark in maps), "before numpy")


def _end_left(session: int) -> int:
    """Return how many processes of a session outlive its leader, and end them."""
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
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] not in (b"Z", b"X"):
            yield int(folder.name)


def summarise_tries(runs: Sequence[dict]) -> dict:
    """Return the counts by verb and signal; a process that ended before its signal is no try."""
    tries = [run for run in runs if run["where"] != "over"]
    gone = sorted(run["seconds_until_gone"] for run in tries)
    return {
        "all_well": all(run["well"] or run["in_python_start"] for run in tries) and len(tries) > 0.8 * len(runs),
        "tries": len(tries),
        "over_before": len(runs) - len(tries),
        "well": sum(run["well"] for run in tries),
        "by_verb_and_signal": {
            f"{verb}, {number.name}": f"{sum(run['well'] for run in found)} of {len(found)}"
            for verb in sorted({run["verb"] for run in tries})
            for number in NUMBERS
            if (found := [run for run in tries if (run["verb"], run["signal"]) == (verb, number.name)])
        },
        "where": Counter(run["where"] for run in tries),
        "statuses": Counter(str(run["status"]) for run in tries),
        "in_python_start": sum(run["in_python_start"] for run in tries),
        "tracebacks": sum(run["traceback"] for run in tries),
        "hung": sum(run["hung"] for run in tries),
        "left_alive": sum(run["left_alive"] for run in tries),
        "seconds_until_gone": {"median": gone[len(gone) // 2], "largest": gone[-1]} if gone else None,
        "runs": list(runs),
    }
