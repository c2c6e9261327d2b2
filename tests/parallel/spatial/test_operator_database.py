"""Every operator and module of torch's own test database on volumes: equal to torch or refused, never wrong."""

import importlib.util
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


def compare(*options: str, seconds: int) -> None:
    """Run the comparison in a process of its own: torch's database changes global settings when it is imported."""
    environment = {**os.environ, "PYTHONPATH": str(Path(volseg.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / "operator_database.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]


def test_two_samples_of_each_operator_are_equal_or_refused() -> None:
    compare("--thin", seconds=500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sample_of_each_operator_is_equal_or_refused() -> None:
    compare("--jobs", "2", seconds=3500)


@pytest.fixture(scope="module")
def differential() -> ModuleType:
    spec = importlib.util.spec_from_file_location("differential", FOLDER / "differential.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["differential"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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
