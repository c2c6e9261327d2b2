"""Compare every operator of torch's own test database on volumes with torch: equal or refused, never wrong.

    python tests/parallel/spatial/operator_database.py            # every case
    python tests/parallel/spatial/operator_database.py --thin     # the cases of ``make test-long``
    python tests/parallel/spatial/operator_database.py --only nn.functional.conv3d "volumes.*"
    python tests/parallel/spatial/operator_database.py --table    # then every entry of the operator table

The database is private to torch: importing it changes global settings (cuDNN's flags, Hypothesis' profile). The tests
therefore run this file in a process of its own. What may be refused is listed by ``operator_table``.
"""
# ruff: noqa: T201  (a script)

import argparse
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import operator_table
import torch
from database_calls import OWN, RANDOM, calls, database, name_of, own_calls
from differential import Call, Verdict, judge, placements
from module_database import judge_module, module_calls, modules
from volume_samples import HANDWRITTEN, is_own

UNAVAILABLE = 77
"""Exit status where this torch has no such database."""

Verdicts = Iterator[tuple[str, Verdict]]
"""Each case in words, and what came of it."""


def judge_calls(list_calls: Callable[[bool], Iterator[tuple[Call, bool]]], thin: bool) -> Verdicts:
    """Judge every placement of calls; in the thinned form, what a change after a call does on the first one only."""
    for call, few in list_calls(thin):
        later = True
        for placement in placements(call):
            if not thin or (few and placement.thin):
                yield f"({call.variant}), {call}, {placement}", judge(call, placement, later)
                later = not thin


def judge_modules(info: Any, thin: bool) -> Verdicts:
    """Judge the calls of a module."""
    for call in module_calls(info, thin):
        yield f"({'train' if call.training else 'eval'}), {call}", judge_module(call)


def tasks() -> dict[str, Callable[[bool], Verdicts]]:
    """List everything that is compared, by name."""
    operators = {name_of(op): op for op in database()}
    own = {name: op for name, op in operators.items() if name not in RANDOM and is_own(op)}
    own |= {name: None for name in HANDWRITTEN if not is_own(operators.get(name))}
    found: dict[str, Callable[[bool], Verdicts]] = {
        **{name: partial(judge_calls, partial(calls, op)) for name, op in operators.items()},
        **{OWN + name: partial(judge_calls, partial(own_calls, name, op)) for name, op in own.items()},
        **{info.name: partial(judge_modules, info) for info in modules()},
    }
    return dict(sorted(found.items()))


TASKS: dict[str, Callable[[bool], Verdicts]] = {}
THIN = False


def run(name: str) -> tuple[Counter[str], list[str]]:
    """Judge one operator or module; return its outcomes, and what is wrong."""
    outcomes, faults = Counter[str](), []
    for case, verdict in TASKS[name](THIN):
        outcomes[verdict.outcome] += 1
        if verdict.outcome in ("WRONG", "CRASH"):
            faults.append(f"{verdict.outcome}, {verdict.kind}: {name} {case}: {verdict.detail[:200]}")
    return outcomes, faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    global THIN
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--thin", action="store_true", help="only the cases of make test-long")
    parser.add_argument("--only", nargs="+", metavar="OPERATOR", help="only these; * stands for anything")
    parser.add_argument("--table", action="store_true", help="then compare the operator table, too")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="write the list of the operator table")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        found = tasks()
    except ImportError as fault:
        print(f"torch {torch.__version__} has no database that can be imported here: {fault}")
        return UNAVAILABLE
    THIN = chosen.thin
    TASKS.update(
        (n, task) for n, task in found.items() if not chosen.only or any(fnmatchcase(n, o) for o in chosen.only)
    )
    with multiprocessing.get_context("fork").Pool(chosen.jobs) as pool:
        results = list(pool.imap(run, TASKS))
    faults = [fault for _, own in results for fault in own]
    print("\n".join(faults))
    print(f"{len(results)} operators and modules: {dict(sum((outcomes for outcomes, _ in results), Counter()))}")
    return int(bool(faults) or bool(chosen.table and operator_table.compare(chosen.only, chosen.write)))


if __name__ == "__main__":
    sys.exit(main())
