"""How old a process is, to who counts all of it."""

import subprocess
import sys
import time

from volseg.lifetime import count_from_beginning, take_age

TICK = 0.02
"""Seconds: the system counts the beginning of a process in hundredths."""


def test_nobody_counts_a_process_that_may_do_something_else():
    assert take_age() == 0


def test_one_piece_of_work_gets_all_seconds_since_its_process_began():
    code = (
        "import time; begun = time.monotonic()\n"
        "from volseg.lifetime import count_from_beginning, take_age\n"
        "count_from_beginning()\n"
        "print(take_age(), time.monotonic() - begun, take_age())"
    )
    begun = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    age, own, again = map(float, run.stdout.split())
    assert own - TICK <= age <= time.monotonic() - begun + TICK
    assert again == 0


def test_a_process_that_begins_anew_counts_from_there(monkeypatch):
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setenv("VOLSEG_BEGUN_ANEW", str(now))
    count_from_beginning()
    assert 0 <= take_age() <= time.clock_gettime(time.CLOCK_BOOTTIME) - now
