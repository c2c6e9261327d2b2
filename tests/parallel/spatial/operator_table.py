"""Compare every entry of the operator table on every cut with torch; exceptions are in a frozen list.

``operator_database.py --table`` runs it. ``--only`` prints the outcome of each cut; ``--write`` writes the list anew,
which may only become shorter. The list (``operator_table.json``) has, for each entry, the cuts that are

- ``refused``: every case was refused (of functions that draw random numbers: one was);
- ``torch refuses``: torch refuses every case as well, such as ``bool`` of a volume of several voxels;
- ``no such cut``: no argument has this dim.

An entry without a case fails: write it a sample in ``table_samples``.
"""
# ruff: noqa: T201  (part of a script)

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from database_calls import database, samples
from differential import Call, Placement, Verdict, judge
from table_samples import FUNCTIONS, RANDOM_ENTRIES, SAMPLES, UNDEFINED_ENTRIES
from volume_samples import HANDWRITTEN, Sample, is_own, of_class, samples_of

from volseg.parallel.spatial.plan.shards import Merged
from volseg.parallel.spatial.signatures import operator_name
from volseg.parallel.spatial.table import TABLE
from volseg.parallel.spatial.volume import ShardedVolume

LIST = Path(__file__).with_suffix(".json")
CUTS = {"D": (-3,), "H": (-2,), "W": (-1,), "batch": (0,), "DxH": (-3, -2), "DxW": (-3, -1), "HxW": (-2, -1)}
"""By name: the dims of a volume that are cut, each into two."""

MERGED = "merged"
"""D, after it was merged with a dim of two behind it."""

CHANGED_AFTERWARDS = ("D", "batch", MERGED)
"""Cuts for which arguments and outputs are changed after the call, too; the database changes them along all."""

MOST_CALLS = 24
"""Cases that are tried of an entry until one is equal; a list of hundreds is thinned evenly."""

OUTCOMES = ("refused", "torch refuses", "no such cut")


@dataclass
class Found:
    """What became of one entry: its outcome by cut, and what is wrong."""

    name: str
    outcomes: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Cases:
    """The samples of every entry."""

    def __init__(self) -> None:
        self.operators: dict[str, list[Any]] = {}
        for op in database():
            for name in {op.name, *(alias.name for alias in op.aliases)}:
                self.operators.setdefault(name.rpartition(".")[2], []).append(op)

    def of(self, label: str, function: Callable) -> list[Sample]:
        """Return samples of the entry: its own, those of its name, those of torch's database."""
        bare = label.rpartition(".")[2]
        names = [label, bare]
        if bare.startswith("__"):
            bare = operator_name(function)
            names.append(bare)
        names.append(bare.removesuffix("_"))
        for name in names:
            if name in SAMPLES:
                return SAMPLES[name]()
        for name in names:
            for key in HANDWRITTEN:
                if key.rpartition(".")[2] == name:
                    return samples_of(key)
        for name in names:
            for op in self.operators.get(name, ()):
                return of_class(op) if is_own(op) else samples(op, torch.float64)
        return []


def calls(label: str, function: Callable, cases: Cases) -> list[Call]:
    """Return the calls of an entry."""
    found = cases.of(label, function)
    chosen = found[:: -(-len(found) // MOST_CALLS) or 1]
    own = FUNCTIONS.get(label, function)
    flags = {"random": label in RANDOM_ENTRIES, "undefined": label in UNDEFINED_ENTRIES}
    return [Call(label, "entry", own, args, kwargs, f"sample {i}", **flags) for i, (args, kwargs) in enumerate(chosen)]


def placements(call: Call, cut: str) -> Iterator[Placement]:
    """List which of a call's tensors are cut, all that fit together first."""
    tensors = call.tensors
    if not tensors:
        return
    base = max(tensors, key=lambda tensor: tensor.ndim)
    dims = _dims(base, cut)
    if dims is None:
        return
    grid, merged = (2,) * len(dims), Merged(1, 2) if cut == MERGED else None
    fitting = {}
    for index, tensor in enumerate(tensors):
        # Counted from the end, as broadcasting does; labels (B, D, H, W) so lie as their logits (B, C, D, H, W).
        own = tuple(dim - base.ndim + tensor.ndim for dim in dims)
        sizes = [(tensor.shape[at], base.shape[dim]) for at, dim in zip(own, dims, strict=True) if at >= 0]
        if len(sizes) == len(dims) and all(size == wanted for size, wanted in sizes):
            fitting[index] = own
    yield Placement(fitting, grid, merged=merged)
    if cut == "batch":
        yield Placement({i: dims for i, tensor in enumerate(tensors) if tensor.ndim == base.ndim}, grid)
    for index in fitting if len(fitting) > 1 else ():
        yield Placement({index: fitting[index]}, grid, merged=merged)


def _dims(tensor: torch.Tensor, cut: str) -> tuple[int, ...] | None:
    """Return which dims of a tensor the cut goes through, or None where it has no such dims."""
    if cut == MERGED:
        fitting = [dim for dim in range(tensor.ndim) if tensor.shape[dim] in (4, 6)]
        preferred = [dim for dim in (tensor.ndim - 3, *fitting) if dim in fitting and (dim > 1 or tensor.ndim < 4)]
        return (preferred[0],) if preferred else None
    if -min(CUTS[cut]) > tensor.ndim or (cut == "batch" and tensor.ndim < 4):
        return None
    dims = tuple(dim % tensor.ndim for dim in CUTS[cut])
    return dims if all(tensor.shape[dim] >= 2 for dim in dims) else None


def examine(label: str, function: Callable, cases: Cases) -> Found:
    """Try an entry on every cut."""
    found, met = Found(label), False
    own = calls(label, function, cases)
    for cut in (*CUTS, MERGED):
        outcomes: Counter[str] = Counter()
        for call, placement in ((each, placement) for each in own for placement in placements(each, cut)):
            with Noted() as noted:
                verdict = judge(call, placement, later=cut in CHANGED_AFTERWARDS)
            # torch may hand another function than the one called: its own name for an alias, what Python code calls.
            met = met or bool(noted & TABLE.keys())
            if verdict.outcome in ("WRONG", "CRASH"):
                found.faults.append(described(call, placement, verdict))
            outcomes[verdict.outcome] += 1
            if verdict.outcome == "equal" and not call.random:
                break
        found.outcomes[cut] = _outcome(outcomes, strict=label in RANDOM_ENTRIES)
    if not met:
        found.faults.append("no case calls it on a volume: write it a sample in table_samples.py")
    return found


def _outcome(outcomes: Counter[str], strict: bool) -> str:
    """Sum up a cut. ``strict``: one refusal is a refusal, where another case is equal because it draws nothing."""
    if outcomes["equal"] and not (strict and outcomes["refused"]):
        return "equal"
    return "refused" if outcomes["refused"] else "torch refuses" if outcomes else "no such cut"


class Noted:
    """Notes which functions met a volume."""

    def __enter__(self) -> set[Any]:
        self.run, noted = ShardedVolume.run_function, set()

        def note(func: Callable, *given: Any) -> Any:
            noted.add(func)
            return self.run(func, *given)

        ShardedVolume.run_function = staticmethod(note)  # type: ignore[method-assign]
        return noted

    def __exit__(self, *_: object) -> None:
        ShardedVolume.run_function = staticmethod(self.run)  # type: ignore[method-assign]


def described(call: Call, placement: Placement, verdict: Verdict) -> str:
    return f"{verdict.outcome}, {verdict.kind}: {call}, {placement}: {verdict.detail[:200]}"


def listed(results: Sequence[Found]) -> dict[str, dict[str, str]]:
    """Return the exceptions: by outcome and entry, the cuts."""
    exceptions: dict[str, dict[str, str]] = {outcome: {} for outcome in OUTCOMES}
    for result in results:
        for outcome in OUTCOMES:
            cuts = [cut for cut, got in result.outcomes.items() if got == outcome]
            if cuts:
                exceptions[outcome][result.name] = " ".join(cuts)
    return exceptions


def complaints(exceptions: dict[str, dict[str, str]], frozen: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Say what is no longer as the list has it; for another torch than the list's, only what is refused now."""
    same = frozen["torch"] == version()
    for outcome in OUTCOMES if same else OUTCOMES[:1]:
        for name in names:
            now, before = (set(found[outcome].get(name, "").split()) for found in (exceptions, frozen))
            known = set().union(*(frozen[each].get(name, "").split() for each in OUTCOMES))
            if more := now - before if same else now - known:
                yield f"{name}: {outcome} along {', '.join(sorted(more))}, which the list does not have"
            if same and (fewer := before - now):
                yield f"{name}: no longer {outcome!r} along {', '.join(sorted(fewer))}: take it off the list (--write)"
    gone = {name for outcome in OUTCOMES for name in frozen[outcome]} - set(names)
    if same and gone:
        yield f"the list names what the table does not: {', '.join(sorted(gone))}"


def written(exceptions: dict[str, dict[str, str]]) -> str:
    """Return the list as JSON, a line per entry."""
    parts = [f'"torch": "{version()}"']
    for outcome, entries in exceptions.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cuts)}" for name, cuts in sorted(entries.items()))
        parts.append(f'"{outcome}": {{\n{lines}\n}}')
    return "{" + ",\n".join(parts) + "}\n"


def version() -> str:
    return torch.__version__.partition("+")[0]


def entries() -> dict[str, Callable]:
    """Return torch's functions of the table by their names there."""
    return {entry.name: function for function, entry in TABLE.items() if entry.family is not None}


def compare(only: Sequence[str] | None, write: bool) -> bool:
    """Compare the entries of these names (None: all) with the list, or write it; say whether something is wrong."""
    cases, known = Cases(), entries()
    names = [name for name in known if not only or any(fnmatchcase(name, own) for own in only)]
    results = [examine(name, known[name], cases) for name in names]
    faults = [f"{result.name}: {fault}" for result in results for fault in result.faults]
    exceptions = listed(results)
    print("\n".join(faults))
    if only:
        for result in results:
            print(result.name, result.outcomes)
        return bool(faults)
    if write:
        LIST.write_text(written(exceptions), encoding="utf-8")
    told = list(complaints(exceptions, json.loads(LIST.read_text(encoding="utf-8")), names))
    print("\n".join(told))
    counts = Counter(outcome for result in results for outcome in result.outcomes.values())
    print(f"{len(results)} entries; of their cuts: {dict(counts)}; {len(faults)} faults")
    return bool(faults or told)
