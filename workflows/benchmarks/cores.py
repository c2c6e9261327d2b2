"""Keep a benchmark to a number of CPU cores, as if the machine had no more."""

import os
import sys

__all__ = ["first_cores", "restart_on"]


def first_cores(count: int, place: int = 0) -> set[int]:
    """Return the ``place``-th ``count`` cores of those this process may use.

    Raises
    ------
    SystemExit
        If there are fewer.
    """
    allowed = sorted(os.sched_getaffinity(0))
    chosen = allowed[place * count : (place + 1) * count]
    if len(chosen) < count:
        sys.exit(f"--cores {count} for {place + 1} process(es) needs {(place + 1) * count} cores, got {len(allowed)}")
    return set(chosen)


def restart_on(cores: int | None) -> None:
    """Start this program anew on so many cores; None, or being there already, changes nothing.

    Setting the affinity alone would leave out the threads that imported libraries have started.
    """
    if cores is None or len(os.sched_getaffinity(0)) == cores:
        return
    os.sched_setaffinity(0, first_cores(cores))
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 (this very program, its own arguments)
