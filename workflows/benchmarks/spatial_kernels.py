"""Compare the kernels of a step on one GPU with those of a rank of several.

    python workflows/benchmarks/spatial_kernels.py ONE.json.gz RANK.json.gz

The files are what `spatial.py` writes for rows with `profile`. Printed, in milliseconds per step: kernels whose time
differs, the time in which no kernel computes (by what else runs then), and the longest kernels of each file.
"""

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path

TRAVELLING = ("nccl", "_exchange_", "_send_kernel", "_receive_kernel", "_direct_")
"""Kernels that wait for other processes; the last three are names in older profiles."""


def load(path: Path) -> list[list]:
    """Return the kernels of two steps by start: start, duration (us), stream, name, grid."""
    return sorted(json.loads(gzip.decompress(path.read_bytes())))


def travels(name: str) -> bool:
    """Say whether a kernel waits for others."""
    return any(part in name for part in TRAVELLING)


def totals(kernels: list[list]) -> dict[str, tuple[int, float]]:
    """Return calls in both steps, and ms per step, of each kernel."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for _, duration, _, name, _ in kernels:
        calls, time = found[name[:60]]
        found[name[:60]] = calls + 1, time + duration / 2e3
    return found


def exposed(kernels: list[list]) -> dict[str, float]:
    """Return ms per step without a computing kernel, by the kernels that run meanwhile."""
    found: dict[str, float] = defaultdict(float)
    computing = [kernel for kernel in kernels if not travels(kernel[3])]
    waiting = [kernel for kernel in kernels if travels(kernel[3])]
    end = computing[0][0]
    for start, duration, *_ in computing:
        if start > end:
            meanwhile = {name[:24] for s, d, _, name, _ in waiting if s < start and s + d > end}
            found[" + ".join(sorted(meanwhile)) or "nothing"] += (start - end) / 2e3
        end = max(end, start + duration)
    return found


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("one", type=Path)
    parser.add_argument("rank", type=Path)
    parser.add_argument("--least", type=float, default=0.02, help="ms of differences that are printed")
    arguments = parser.parse_args()
    one, rank = load(arguments.one), load(arguments.rank)
    before, after = totals(one), totals(rank)
    nothing = 0, 0.0
    differences = {
        name: after.get(name, nothing)[1] - before.get(name, nothing)[1] for name in before.keys() | after.keys()
    }
    for name, difference in sorted(differences.items(), key=lambda item: item[1]):
        if abs(difference) >= arguments.least:
            (calls, time), (calls_after, time_after) = before.get(name, nothing), after.get(name, nothing)
            print(f"{difference:+8.3f}  {calls:4d} {time:8.3f}  {calls_after:4d} {time_after:8.3f}  {name}")
    for title, kernels in (("one", one), ("rank", rank)):
        print(title, {name: round(time, 3) for name, time in sorted(exposed(kernels).items(), key=lambda x: -x[1])[:8]})
        longest = sorted(kernels, key=lambda kernel: -kernel[1])[:8]
        print("    longest:", [(round(duration), name[:28], grid) for _, duration, _, name, grid in longest])


if __name__ == "__main__":
    main()
