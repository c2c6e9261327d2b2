"""Every operator and module of torch's own test database on volumes: equal to torch or refused, never wrong."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import volseg
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial import ShardedVolume

FOLDER = Path(__file__).parent
UNAVAILABLE = 77


def compare(script: str, *options: str, seconds: int) -> None:
    """Run a comparison in a process of its own: torch's database changes global settings when it is imported."""
    # Without GPUs: what torch refuses must not hang on the machine.
    paths = {"PYTHONPATH": str(Path(volseg.__file__).parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **paths}
    command = [sys.executable, str(FOLDER / script), *options]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=seconds, encoding="utf-8")
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]


@pytest.mark.timeout(900)
def test_two_samples_of_each_operator_and_every_entry_of_the_table_are_equal_or_refused() -> None:
    """In one process: importing torch's database takes as long as a tenth of its samples."""
    compare("operator_database.py", "--thin", "--table", seconds=900)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sample_of_each_operator_is_equal_or_refused() -> None:
    compare("operator_database.py", "--jobs", "2", seconds=3500)


def loaded(name: str) -> ModuleType:
    """Import a module of this folder without importing torch's database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def differential() -> ModuleType:
    return loaded("differential")


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return loaded("operator_table")


def test_the_list_of_refusals_only_shrinks(table: ModuleType) -> None:
    frozen = {"torch": table.version(), "refused": {"a": "D H"}, "torch refuses": {}, "no such cut": {"b": "W"}}
    now = {"refused": {"a": "D H"}, "torch refuses": {}, "no such cut": {"b": "W"}}
    assert list(table.complaints(now, frozen, ["a", "b"])) == []
    for change, message in {
        ("refused", "a", "D H W"): "a: refused along W, which the list does not have",
        ("refused", "a", "D"): "a: no longer 'refused' along H: take it off the list (--write)",
        ("no such cut", "b", "W D"): "b: no such cut along D, which the list does not have",
    }.items():
        outcome, entry, cuts = change
        changed = {**now, outcome: {entry: cuts}}
        assert list(table.complaints(changed, frozen, ["a", "b"])) == [message]
    assert list(table.complaints(now, frozen, ["a"])) == ["the list names what the table does not: b"]
    other = {**frozen, "torch": "0.1"}
    assert list(table.complaints({**now, "refused": {}}, other, ["a", "b"])) == []
    assert list(table.complaints({**now, "refused": {"b": "H"}}, other, ["a", "b"])) == [
        "b: refused along H, which the list does not have"
    ]


class NoCases:
    @staticmethod
    def of(label: str, function: Callable) -> list[Any]:
        return []


def test_an_entry_without_a_case_fails(table: ModuleType) -> None:
    found = table.examine("torch.relu", torch.relu, NoCases)
    assert found.faults == ["no case calls it on a volume: write it a sample in table_samples.py"]


class OneCase:
    @staticmethod
    def of(label: str, function: Callable) -> list[Any]:
        return [((torch.arange(48, dtype=torch.float64).reshape(1, 2, 6, 2, 2),), {})]


def test_the_outcomes_are_what_happens_on_the_cuts(table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("D", "H", "W", "batch", "DxH", "DxW", "HxW", "merged")
    assert set(table.examine("torch.relu", torch.relu, OneCase).outcomes) == set(names)
    monkeypatch.setitem(table.FUNCTIONS, "torch.relu", lambda x: x.relu().movedim(2, 3).tolist() if cut(x) else x)
    found = table.examine("torch.relu", torch.relu, OneCase).outcomes
    assert found["D"] == found["HxW"] == found["merged"] == "refused"
    assert found["batch"] == "no such cut"
    monkeypatch.setitem(table.FUNCTIONS, "torch.relu", lambda x: x.relu() * (1 + cut(x)))
    assert any("value of output" in fault for fault in table.examine("torch.relu", torch.relu, OneCase).faults)


def cut(x: Tensor) -> bool:
    return isinstance(x, ShardedVolume)


def fails(fault: Exception) -> Any:
    raise fault


def changed_unless_cut(x: Tensor) -> None:
    if not cut(x):
        x.mul_(2)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "right": (lambda x: x * 2, "equal", ""),
    "refused": (lambda x: fails(UnsupportedOperatorError("no")) if cut(x) else x, "refused", ""),
    "refused by torch": (lambda x: fails(ValueError("no")), "raises", ""),
    "value": (lambda x: x * (1 + cut(x)), "WRONG", "value of output"),
    "dtype": (lambda x: x.float() if cut(x) else x.clone(), "WRONG", "dtype of output"),
    "shape": (lambda x: x.sum() if cut(x) else x.sum((0, 1)), "WRONG", "shape of output"),
    "structure": (lambda x: [x * 2] if cut(x) else (x * 2,), "WRONG", "structure"),
    "python value": (lambda x: 1 if cut(x) else 1.0, "WRONG", "value of output"),
    "history": (lambda x: x.detach() * 2 if cut(x) else x * 2, "WRONG", "requires_grad of output"),
    "gradient": (lambda x: x.detach() + x if cut(x) else x * 2, "WRONG", "gradient"),
    "lost change": (changed_unless_cut, "WRONG", "value of argument after the call"),
    "copy of a view": (
        lambda x: x.clone() if cut(x) else x[:],
        "WRONG",
        "value of argument after the call after a change of the output",
    ),
    "view of a copy": (
        lambda x: x[:] if cut(x) else x.clone(),
        "WRONG",
        "value of argument after the call after a change of the output",
    ),
    "accepted": (lambda x: x if cut(x) else fails(ValueError("no")), "WRONG", "accepts what torch refuses"),
    "crash": (lambda x: fails(KeyError("input")) if cut(x) else x, "CRASH", "call"),
    "other error": (
        lambda x: fails(KeyError("x") if cut(x) else ValueError("x")),
        "CRASH",
        "another error than torch's",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_comparison_sees_each_kind_of_fault(name: str, differential: ModuleType) -> None:
    function, outcome, kind = FUNCTIONS[name]
    x = torch.arange(24, dtype=torch.float64).reshape(2, 1, 6, 2).requires_grad_()
    call = differential.Call(name, "function", function, (x,))
    verdict = differential.judge(call, differential.Placement({0: (2,)}, (2,)))
    assert (verdict.outcome, verdict.kind) == (outcome, kind), verdict
