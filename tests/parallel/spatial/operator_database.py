"""Every operator of torch's own test database on volumes, beside torch: equal or refused, never wrong.

    python tests/parallel/spatial/operator_database.py            # every case, compared with the committed table
    python tests/parallel/spatial/operator_database.py --thin     # the cases of ``make test-long``
    python tests/parallel/spatial/operator_database.py --only nn.functional.conv3d "volumes.*"
    python tests/parallel/spatial/operator_database.py --write    # the committed table, anew; with --thin its half
    python tests/parallel/spatial/operator_database.py --table    # then every entry of the operator table

The database is private to torch: importing it changes global settings (cuDNN's flags, Hypothesis' profile). The tests
therefore run this file in a process of its own. The table holds, for each operator, how many cases are equal and how
many are refused; cases for which torch raises as well are compared but not counted.
"""
# ruff: noqa: T201  (a script)

import argparse
import json
import multiprocessing
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import operator_table
import torch
from database_calls import OWN, RANDOM, calls, database, name_of, own_calls
from differential import Call, Verdict, judge, placements
from module_database import ModuleCall, judge_module, module_calls, modules
from operator_table import version
from volume_samples import HANDWRITTEN, is_own

TABLE = Path(__file__).with_suffix(".json")
UNAVAILABLE = 77
"""Exit status where this torch has no such database."""

Counts = dict[str, list[int]]
"""By form ("whole", "thin"): how many cases are equal, and how many refused."""


@dataclass(frozen=True)
class Fault:
    """A case that is wrong, or crashed."""

    operator: str
    variant: str
    call: str
    where: str
    verdict: Verdict

    def __str__(self) -> str:
        what = f"{self.verdict.outcome}, {self.verdict.kind}: {self.operator} ({self.variant}), {self.call}"
        return f"{what}, {self.where}: {self.verdict.detail[:200]}"


@dataclass
class Result:
    """What was found for one operator."""

    name: str
    counts: Counts = field(default_factory=lambda: {"whole": [0, 0], "thin": [0, 0]})
    faults: "list[Fault]" = field(default_factory=list)
    num_cases: int = 0

    def add(self, call: Call, thin_call: bool, thin: bool) -> None:
        """Judge every placement of a call; in the thinned form, what a change after it does on the first one only."""
        later = True
        for placement in placements(call):
            belongs = thin_call and placement.thin
            if thin and not belongs:
                continue
            self.note(call.variant, call, str(placement), belongs, judge(call, placement, later))
            later = not thin

    def note(self, variant: str, call: Call | ModuleCall, where: str, thin: bool, verdict: Verdict) -> None:
        """Count a verdict."""
        self.num_cases += 1
        if verdict.outcome in ("WRONG", "CRASH"):
            self.faults.append(Fault(self.name, variant, str(call), where, verdict))
        elif verdict.outcome != "raises":
            for form in ("whole", "thin") if thin else ("whole",):
                self.counts[form][verdict.outcome == "refused"] += 1


@dataclass(frozen=True)
class ModuleTask:
    """A module of the database."""

    name: str
    info: Any


@dataclass(frozen=True)
class Task:
    """An operator of the database, or a name with samples of our own."""

    name: str
    op: Any
    own: bool

    def calls(self, thin: bool) -> Iterator[tuple[Call, bool]]:
        """List the calls; see ``calls``."""
        if self.own:
            return ((call, few) for call, few in own_calls(self.name.removeprefix(OWN), self.op) if few or not thin)
        return calls(self.op, thin)


def tasks() -> list[Task | ModuleTask]:
    """List everything that is compared, by name."""
    operators = {name_of(op): op for op in database()}
    found: list[Task | ModuleTask] = [Task(name, op, own=False) for name, op in operators.items()]
    found += [Task(OWN + name, op, own=True) for name, op in operators.items() if name not in RANDOM and is_own(op)]
    found += [Task(OWN + name, None, own=True) for name in HANDWRITTEN if not is_own(operators.get(name))]
    found += [ModuleTask(info.name, info) for info in modules()]
    return sorted(found, key=lambda task: task.name)


def run(task: Task | ModuleTask, thin: bool) -> Result:
    """Judge one operator or module."""
    result = Result(task.name)
    if isinstance(task, ModuleTask):
        for call, belongs in module_calls(task.info, thin):
            result.note("train" if call.training else "eval", call, "spatial", belongs, judge_module(call))
    else:
        for call, thin_call in task.calls(thin):
            result.add(call, thin_call, thin)
    return result


def updated(table: dict[str, Any], results: Sequence[Result], forms: Sequence[str], everything: bool) -> dict[str, Any]:
    """Return the table with what was run; ``everything``: operators that were not run are no more."""
    operators = {}
    for result in results:
        known = table["operators"].get(result.name, Result(result.name).counts)
        operators[result.name] = known | {form: result.counts[form] for form in forms}
    operators = operators if everything else table["operators"] | operators
    return {"torch": version(), "operators": {name: n for name, n in operators.items() if any(map(any, n.values()))}}


def written(table: dict[str, Any]) -> str:
    """Return the table as JSON, a line per operator."""
    lines = [f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in sorted(table["operators"].items())]
    body = ",\n".join(lines)
    return f'{{"torch": "{table["torch"]}", "operators": {{\n{body}\n}}}}\n'


def complaints(results: Sequence[Result], table: dict[str, Any], form: str) -> Iterator[str]:
    """Compare the counts with the table's: what was equal may not be refused now.

    Samples differ between versions of torch: for another one than the table's, only an operator of which nothing is
    equal any more is told.
    """
    same = table["torch"] == version()
    for result in results:
        known = table["operators"].get(result.name)
        (equal, refused), before = result.counts[form], known[form] if known else [0, 0]
        if same and [equal, refused] != before:
            yield f"{result.name}: {equal} equal and {refused} refused, the table has {before[0]} and {before[1]}"
        elif not same and before[0] and not equal and refused:
            yield f"{result.name}: all {refused} cases are refused now, the table has {before[0]} equal"


def _run(index: int) -> Result:
    return run(TASKS[index], THIN)


TASKS: list[Task | ModuleTask] = []
THIN = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    global THIN
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--thin", action="store_true", help="only the cases of make test")
    parser.add_argument("--only", nargs="+", metavar="OPERATOR", help="only these; * stands for anything")
    parser.add_argument("--table", action="store_true", help="then compare the operator table, too")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="write what was run into the committed table")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        found = tasks()
    except ImportError as fault:
        print(f"torch {torch.__version__} has no database that can be imported here: {fault}")
        return UNAVAILABLE
    THIN = chosen.thin
    TASKS.extend(task for task in found if not chosen.only or any(fnmatchcase(task.name, o) for o in chosen.only))
    status = _conclude(_results(chosen.jobs), chosen)
    return int(chosen.table and operator_table.compare(chosen.only, chosen.write)) or status


def _results(jobs: int) -> list[Result]:
    order = range(len(TASKS))
    if jobs == 1:
        return [_run(index) for index in order]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return sorted(pool.imap_unordered(_run, order), key=lambda result: result.name)


def _conclude(results: Sequence[Result], chosen: argparse.Namespace) -> int:
    form = "thin" if chosen.thin else "whole"
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if chosen.write:
        table = updated(table, results, ("thin",) if chosen.thin else ("whole", "thin"), everything=not chosen.only)
        TABLE.write_text(written(table), encoding="utf-8")
    told = list(complaints(results, table, form))
    faults = sorted(str(fault) for result in results for fault in result.faults)
    print("\n".join((*faults, *told)))
    if told:
        print(f"To accept these counts: python {Path(__file__).name} --write")
    equal, refused = (sum(result.counts[form][at] for result in results) for at in (0, 1))
    print(
        f"{len(results)} operators and modules, {sum(result.num_cases for result in results)} cases: {equal} equal, "
        f"{refused} refused, {len(faults)} wrong or crashed"
    )
    return 1 if faults or told else 0


if __name__ == "__main__":
    sys.exit(main())
