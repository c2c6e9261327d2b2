"""The largest cube that N GPUs train, found by trying, and a table of it.

A try is a whole training step that keeps nothing it can recompute. Tries that fit follow each other in one group of
processes. Where memory ends on one process the others wait in an exchange that nobody will answer: the group ends, and
the search goes on in a new one.
"""

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["finished", "forecast", "next_side", "search", "table"]

Row = dict[str, Any]

BYTES_PER_VOXEL = 480
"""Where the search begins; a wrong value costs tries, not the result."""


def forecast(memory_bytes: float, gpus: int, multiple: int) -> int:
    """Return the side to try first."""
    side = (0.95 * memory_bytes * gpus / BYTES_PER_VOXEL) ** (1 / 3)
    return max(multiple, int(side) // multiple * multiple)


def next_side(tries: Sequence[Row], first: int, multiple: int) -> int | None:
    """Return the side to try next, or None where the largest is known.

    From the first guess in growing strides until one side fits and another does not, then by halves.
    """
    fitting = [attempt["side"] for attempt in tries if attempt["fits"]]
    failing = [attempt["side"] for attempt in tries if not attempt["fits"]]
    if not tries:
        return first
    low, high = max(fitting, default=0), min(failing, default=0)
    if not failing:
        return low + multiple * 2 ** (len(fitting) - 1)
    if high - low <= multiple:
        return None
    if not fitting:
        return max(multiple, high - multiple * 2 ** (len(failing) - 1))
    return low + (high - low) // multiple // 2 * multiple


def search(row: Row, measure: Callable[[list[int]], Row], tell: Callable[[Row], None]) -> Row:
    """Go on with the tries of ``row`` in this group of processes; every process calls this.

    ``tell`` is given what is known after each try. The result has ``"ended"`` where memory ended: this group is of no
    further use then.
    """
    found: Row = {"tries": list(row.get("tries", ()))}
    memory = _memory(row.get("memory_gib"))
    first = row.get("first") or forecast(memory, row["gpus"], row["multiple"])
    while (side := next_side(found["tries"], first, row["multiple"])) is not None:
        try:
            attempt = measure([side] * 3)
            if dist.is_initialized():
                dist.barrier()  # it fits where it fits on every process
        except (RuntimeError, MemoryError) as fault:
            if not _is_out_of_memory(fault):
                raise
            found["tries"].append({"side": side, "fits": False, "why": str(fault).partition("\n")[0][:300]})
            return found | {"ended": "out of memory"}
        found["tries"].append({"side": side, "fits": True, **attempt})
        tell(found)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def _memory(limit_gib: float | None) -> float:
    """Return the bytes that this process may use; where asked for, let it have no more."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if limit_gib:
            torch.cuda.set_per_process_memory_fraction(limit_gib * 2**30 / total)
        return limit_gib * 2**30 if limit_gib else total
    if not limit_gib:
        return 2**30  # a dry run
    limit = int(limit_gib * 2**30)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, resource.RLIM_INFINITY))
    return limit


def _is_out_of_memory(fault: BaseException) -> bool:
    # Libraries below torch, and torch on a CPU, raise a plain RuntimeError.
    told = str(fault).lower()
    return isinstance(fault, MemoryError) or "out of memory" in told or "can't allocate memory" in told


def finished(row: Row) -> bool:
    """Say whether the search of this row has an answer."""
    tries = row.get("tries") or []
    return bool(tries) and next_side(tries, 0, row["multiple"]) is None


def _ends(row: Row) -> tuple[Row | None, int | None]:
    """Return the largest try that fitted, and the smallest side that did not."""
    tries = row.get("tries") or []
    fitting = max((attempt for attempt in tries if attempt["fits"]), key=lambda attempt: attempt["side"], default=None)
    return fitting, min((attempt["side"] for attempt in tries if not attempt["fits"]), default=None)


def table(found: Sequence[Row]) -> str:
    """Return the searches as a table in Markdown."""
    lines = [
        "| network | GPUs | largest cube | Mvoxel | GiB per GPU | bytes per voxel | s per step | did not fit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        best, above = _ends(row)
        refused = " ".join([f"{above}^3"] * bool(above) + ["(search not finished)"] * (not finished(row)))
        if best is None:
            lines.append(f"| {row['net']} | {row['gpus']} | none | | | | | {refused} |")
            continue
        side = best["side"]
        lines.append(
            f"| {row['net']} | {row['gpus']} | {side}^3 | {side**3 / 1e6:.0f} | {best['peak_gib']:.1f} "
            f"| {best['bytes_per_voxel']:.0f} | {best['ms'] / 1e3:.2f} | {refused} |"
        )
    return "\n".join(lines)
