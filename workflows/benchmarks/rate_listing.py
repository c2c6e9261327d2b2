"""All cases, in the order in which they are timed, and their times as rows of a table."""

import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rate_cases import RateCase
from rate_convolutions import list_convolutions
from rate_others import list_others
from rate_passes import list_passes

from volseg.device import triton_tiles
from volseg.estimate.calibration import time_calls
from volseg.estimate.trace import KernelRun

__all__ = ["describe_run", "list_cases", "measure_cases"]

Measured = dict[str, Any]
"""A row of the table: the fields of a ``KernelRun``, and ``seconds``."""


def list_cases() -> list[RateCase]:
    """Return all cases in an order of which any beginning covers every kind."""
    cases = [*list_convolutions(), *list_passes(), *list_others()]
    if not triton_tiles.available():
        cases = [case for case in cases if "ours" not in case.name]
    random.Random(0).shuffle(cases)  # noqa: S311  (the same order everywhere: processes share the list)
    return cases


def describe_run(run: KernelRun, seconds: float) -> Measured:
    """Return a row as JSON keeps it."""
    return {**asdict(run), "dtype": str(run.dtype).removeprefix("torch."), "seconds": seconds}


def measure_cases(
    cases: Sequence[RateCase], device: torch.device, until: float
) -> tuple[list[Measured], dict[str, str]]:
    """Time the cases one by one.

    Parameters
    ----------
    cases
        In the order in which they are wanted.
    device
        A GPU, which does nothing else meanwhile.
    until
        When to stop, on the clock of ``time.monotonic``.

    Returns
    -------
    tuple
        The rows, and why other cases have none.
    """
    rows: list[Measured] = []
    left_out: dict[str, str] = {}
    # Not what is left of another process's memory while it starts: half of what this GPU has.
    room = torch.cuda.get_device_properties(device).total_memory // 2
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):
        for case in cases:
            if time.monotonic() > until:
                left_out[case.name] = "no time was left"
            elif 2 * case.size > room:
                left_out[case.name] = f"takes {case.size / 2**30:.1f} GiB"
            else:
                try:
                    rows += [describe_run(run, time_calls(call, stream)) for run, call in case.prepare(device)]
                except Exception as fault:  # no such kernel on this GPU, too little memory: the others count
                    left_out[case.name] = f"{type(fault).__name__}: {fault}"[:300]
                    torch.cuda.synchronize()  # raises, where the GPU itself has failed
    return rows, left_out
