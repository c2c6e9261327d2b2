"""The largest volume that really trains in each way, found by bisection from what is forecast to be the largest.

    python workflows/benchmarks/largest_volumes.py --forecast > rows.json
    python workflows/benchmarks/largest_volumes.py --rows rows.json --result volumes.json --seconds 50

The first needs no GPU and takes minutes; the second takes GPUs. A volume grows along its first side; with
``--cubes 1 2 4`` the first prints searches of the largest cube on so many GPUs, by DynUNet with all activations
recomputed, whose volumes grow along all sides. Each try trains three steps or more in a process of its own
(`plan_accuracy.py`), which may reserve as much of a GPU as ``--memory`` leaves beside CUDA and its libraries; who is
out of memory did not train. Searches go on side by side, each with one try at a time: from the forecast up until one
does not train, or down until one does, in growing strides, and then by halves. The JSON is rewritten after every round,
and ``--rows volumes.json`` goes on with it.

Without a GPU ``--device cpu --pretended-voxels N`` tries the script itself: what has more voxels is out of memory.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from plan_accuracy import Pool
from results import make_parser, write_result
from workers import Row

UNIT = 16
"""Planes by which volumes grow: what every network of the list divides a side by."""

FIRST = 384
"""Planes at which the search of the forecast begins."""

GIB = 2**30


def main() -> None:
    """Estimate, or search on GPUs, and write what was found."""
    parser = make_parser(__doc__)
    parser.add_argument("--forecast", action="store_true", help="print the searches with what is forecast of them")
    parser.add_argument("--rows", type=Path, help="JSON: searches as --forecast printed them, or an earlier result")
    parser.add_argument("--result", type=Path, help="JSON to write")
    parser.add_argument("--cubes", type=int, nargs="+", metavar="GPUS", help="search cubes, cut over so many GPUs")
    parser.add_argument("--memory", type=float, default=16, metavar="GIB", help="of each GPU that is planned for")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORDS", help="searches whose name has these")
    parser.add_argument("--seconds", type=float, default=50, help="after which no try is begun")
    parser.add_argument("--limit", type=float, default=40, help="seconds for one try")
    parser.add_argument("--gpus", type=int, help="default all that are visible")
    parser.add_argument("--ahead", type=int, default=4, help="processes that wait for their turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pretended-voxels", type=int, help="with --device cpu: more are out of memory")
    chosen = parser.parse_args()
    rows = json.loads(chosen.rows.read_text(encoding="utf-8")) if chosen.rows else list_searches(chosen.cubes)
    rows = rows["rows"] if isinstance(rows, dict) else rows
    rows = [row for row in rows if all(words in name_search(row) for words in chosen.only)]
    if chosen.forecast:
        print(json.dumps([row | foretell(row, int(chosen.memory * GIB)) for row in rows], indent=1))
    elif chosen.rows is None or chosen.result is None:
        parser.error("name what --forecast printed by --rows, and the file for the result by --result")
    else:
        measure_all(rows, chosen)


def list_searches(cubes: Sequence[int] | None = None) -> list[Row]:
    """Return the searches of the largest cubes on these numbers of GPUs.

    By default those of ``volseg plan --max-volume`` on one GPU: recorded steps, plain and by tiles. Volumes are one
    unit deep.
    """
    plain = {"batch": 1, "precision": "bf16", "layout": "contiguous", "ema": None, "patch": [UNIT, 160, 160]}
    way = {"spatial": 1, "pipeline": 1, "split_size": None, "checkpoint": None, "kernels": "fast", "recorded": True}
    dynunet, vnet, segresnet, unet = ({**plain, **way, "net": net} for net in ("dynunet", "vnet", "segresnet", "unet"))
    if cubes:
        cube = {**dynunet, "recorded": False, "checkpoint": "all", "measured_s": 0}
        return [{**cube, "spatial": gpus, "unit": 64, "patch": [64] * 3, "cube": True} for gpus in cubes]
    return [dynunet, {**vnet, "patch": [UNIT, 128, 128]}, {**segresnet, "checkpoint": "tiled"}, unet]


def name_search(row: Row) -> str:
    """Return a search as one word per choice: the name of its rows without their first side."""
    # It imports torch and volseg.
    from plan_accuracy_rows import name_row

    name = name_row({**row, "patch": ["N"] * 3 if row.get("cube") else ["N", *row["patch"][1:]]})
    return str(name)


def at_side(row: Row, side: int) -> Row:
    """Return the configuration whose first side, or whose cube's sides, have so many planes."""
    resized = {**row, "patch": [side] * 3 if row.get("cube") else [side, *row["patch"][1:]]}
    return {key: value for key, value in resized.items() if key not in ("tries", "name", "forecast_side")}


def foretell(row: Row, gpu_bytes: int) -> Row:
    """Return the first side of the largest that is forecast to train, and what torch may reserve of a GPU then."""
    # It imports torch and volseg.
    from plan_accuracy_compared import forecast_row

    outside, tries = 0, []
    while (side := next_side(tries, FIRST, row.get("unit", UNIT))) is not None:
        memory = (found := forecast_row(at_side(row, side), gpu_bytes=gpu_bytes)).memory
        if memory is None:
            raise SystemExit(f"{name_search(row)} is not followed: {found.refused}")
        outside = max(outside, memory.outside)
        tries.append({"side": side, "fits": memory.total <= gpu_bytes})
    return {"forecast_side": find_largest(tries), "limit_bytes": gpu_bytes - outside}


def next_side(tries: Sequence[Row], first: int, unit: int) -> int | None:
    """Return the side to try next, or None where the largest is known.

    From the first guess in growing strides until one side fits and another does not, then by halves.
    """
    fitting = [attempt["side"] for attempt in tries if attempt["fits"]]
    failing = [attempt["side"] for attempt in tries if not attempt["fits"]]
    if not tries:
        return first
    low, high = max(fitting, default=0), min(failing, default=0)
    if not failing:
        return low + unit * 2 ** (len(fitting) - 1)
    if high - low <= unit:
        return None
    if not fitting:
        return max(unit, high - unit * 2 ** (len(failing) - 1))
    return low + (high - low) // unit // 2 * unit


def go_on(row: Row) -> int | None:
    """Return the side that a search tries next; None where it is over."""
    unit = row.get("unit", UNIT)
    return next_side(row.get("tries", ()), row["forecast_side"] or unit, unit)


def find_largest(tries: Sequence[Row]) -> int:
    """Return the largest side that trained; 0 where none has."""
    return max((found["side"] for found in tries if found["fits"]), default=0)


def measure_all(rows: Sequence[Row], chosen: argparse.Namespace) -> None:
    """Go on with all searches, a try of each at a time, until they end or the time is up."""
    until = time.monotonic() + chosen.seconds
    pool = Pool(chosen)
    try:
        while time.monotonic() < until and (tries := list(list_tries(rows, chosen.pretended_voxels))):
            run_round(tries, rows, lambda waiting: pool.measure(waiting, until, later=len(waiting)))
            write_result(chosen.result, indent=None, rows=rows, summary=list(map(summarise, rows)))
    finally:
        pool.end()
    summary = list(map(summarise, rows))
    write_result(chosen.result, indent=None, rows=rows, summary=summary)
    print(json.dumps(summary, indent=1))


def list_tries(rows: Sequence[Row], pretended_voxels: int | None) -> Iterator[Row]:
    """Yield the next try of each search that goes on, with the search's number."""
    for number, row in enumerate(rows):
        if not has_failed(row) and (side := go_on(row)) is not None:
            yield at_side(row, side) | {"pretended_voxels": pretended_voxels, "search": number}


def has_failed(row: Row) -> bool:
    """Say whether a try ended by something else than a lack of memory."""
    return any("failed" in found for found in row.get("tries", ()))


def run_round(tries: Sequence[Row], rows: Sequence[Row], measure: Callable[[Sequence[Row]], Iterator[Row]]) -> None:
    """Run a try of each search, and put down what became of it."""
    # It imports torch and volseg.
    from plan_accuracy_rows import name_row

    for found in measure([{"name": name_row(row), **row} for row in tries]):
        told = {key: found[key] for key in ("failed", "out_of_memory", "wall_s", "seconds") if key in found}
        for kind in ("max_memory_reserved", "max_memory_allocated"):
            told |= {kind: max(found[kind])} if found.get(kind) else {}
        fits = not {"failed", "out_of_memory"} & told.keys()
        rows[found["search"]].setdefault("tries", []).append({"side": found["patch"][0], "fits": fits, **told})
        print(f"{found['name']}: {'trained' if fits else 'did not train'}", flush=True)


def summarise(row: Row) -> Row:
    """Return what a search came to."""
    tries, forecast = row.get("tries", ()), row["forecast_side"]
    largest = find_largest(tries)
    found = {
        "name": name_search(row),
        "largest_forecast": forecast,
        "largest_that_trained": largest,
        "first_that_did_not": min((one["side"] for one in tries if not one["fits"]), default=None),
        "trained_over_forecast": largest / forecast if forecast else None,
        "is_over": has_failed(row) or go_on(row) is None,
    }
    return found | ({"failed": True} if has_failed(row) else {})


if __name__ == "__main__":
    main()
