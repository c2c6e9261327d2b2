"""Cases prepared by a copy of this process are those that this process would have prepared."""

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data import cases_ahead
from volseg.data.cases import Task
from volseg.data.cases_ahead import CasesAhead, can_prepare_ahead
from volseg.data.layouts import load_task
from volseg.data.preparing import PreparedCases, prepare_ahead, prepare_together
from volseg.data.readers import SUFFIXES
from volseg.data.synthetic import make_task
from volseg.errors import DataError
from volseg.transforms.preprocessing import Preprocessing, build_preprocessing

pytestmark = pytest.mark.skipif(not can_prepare_ahead(), reason="needs Linux, two cores and no GPU in use")

STEPS = [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1.0, 1.0, 1.5]}, {"name": "ZScore"}]


@pytest.fixture
def task(tmp_path) -> Task:
    return load_task(make_task(tmp_path / "task", num_cases=6, num_test=0))


@pytest.fixture
def steps() -> Preprocessing:
    return build_preprocessing(STEPS)


def begun(task: Task, steps: Preprocessing, skip_bad: bool = False) -> CasesAhead:
    ahead = prepare_ahead(task.training[:4], task.training[4:], task, steps, skip_bad=skip_bad)
    assert ahead is not None
    return ahead


def prepared(task: Task, steps: Preprocessing, ahead: CasesAhead | None = None, **more: Any) -> PreparedCases:
    return prepare_together(task.training[:4], task.training[4:], task, steps, ahead=ahead, **more)


def wait_until_begun(ahead: CasesAhead, count: int) -> None:
    end = time.monotonic() + 60
    while int.from_bytes(ahead._signs[:8], "little") < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def plain(value: Any) -> Any:
    """Return everything that a value says, down to bits and strides; which transform it was is said by an address."""
    if isinstance(value, Tensor):
        bits = value.as_subclass(Tensor).contiguous()
        told = (type(value), tuple(value.shape), value.stride(), value.dtype, bits.numpy().tobytes())
        return (*told, plain(vars(value))) if isinstance(value, MetaTensor) else told
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if str(key) != "id"}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return (type(value), repr(value))


def same(one: PreparedCases, other: PreparedCases) -> bool:
    return all(
        plain(getattr(one, name)) == plain(getattr(other, name))
        for name in ("training", "validation", "order", "problems", "fingerprints", "remarks")
    )


@pytest.mark.parametrize("waits_for", [0, 2, 6])
def test_the_cases_are_the_same_however_many_the_copy_has_made(task, steps, waits_for):
    alone = prepared(task, steps)
    with begun(task, steps) as ahead:
        wait_until_begun(ahead, waits_for)
        beside = prepared(task, steps, ahead)
    assert same(alone, beside)
    assert not same(alone, replace(beside, order=[]))  # the comparison tells


def test_the_copy_does_prepare_and_its_memory_outlives_it(task, steps):
    with begun(task, steps) as ahead:
        wait_until_begun(ahead, 6)
        assert ahead.stop() == 6
        brought = dict(ahead.collect())
    assert list(brought) in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])  # it may be told between two cases
    image = brought[0].prepared["image"]
    image += 1  # the mapping is this process's own
    assert image.isfinite().all()
    assert not multiprocessing.active_children()


def test_a_copy_that_is_killed_leaves_its_cases_to_this_process(task, steps):
    with begun(task, steps) as ahead:
        os.kill(ahead._process.pid, signal.SIGKILL)
        assert same(prepared(task, steps, ahead), prepared(task, steps))


def test_a_copy_that_does_not_go_on_is_ended(task, steps, monkeypatch, caplog):
    monkeypatch.setattr(cases_ahead, "PATIENCE_S", 0.5)
    with begun(task, steps) as ahead:
        os.kill(ahead._process.pid, signal.SIGSTOP)
        assert same(prepared(task, steps, ahead), prepared(task, steps))
    assert "prepared here" in caplog.text
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("waits_for", [0, 6])
def test_bad_cases_are_told_as_ever(task, steps, waits_for):
    task.training[1]["image"].write_bytes(b"no image")
    task.training[4]["label"].write_bytes(b"no label")
    with pytest.raises(DataError) as alone:
        prepared(task, steps)
    with begun(task, steps) as ahead:
        wait_until_begun(ahead, waits_for)
        with pytest.raises(DataError) as beside:
            prepared(task, steps, ahead)
    assert str(beside.value) == str(alone.value)
    with begun(task, steps, skip_bad=True) as ahead:
        wait_until_begun(ahead, waits_for)
        assert same(prepared(task, steps, ahead, skip_bad=True), prepared(task, steps, skip_bad=True))


def test_a_step_that_fails_fails_here(task):
    steps = build_preprocessing([{"name": "CropForeground", "above": 1e9}])
    with begun(task, steps) as ahead:
        wait_until_begun(ahead, 6)
        with pytest.raises(Exception, match="CropForeground") as beside:
            prepared(task, steps, ahead)
    with pytest.raises(type(beside.value), match="CropForeground"):
        prepared(task, steps)


def test_other_cases_or_steps_take_nothing(task, steps, monkeypatch):
    other = build_preprocessing(STEPS[:2])
    expected = prepared(task, other)
    with begun(task, steps) as ahead:
        wait_until_begun(ahead, 6)
        monkeypatch.setattr(CasesAhead, "collect", lambda self: pytest.fail("took cases prepared otherwise"))
        assert same(prepared(task, other, ahead), expected)
        assert not multiprocessing.active_children()


def test_the_users_own_reader_is_not_copied(task, steps):
    SUFFIXES.register(".own", lambda path: torch.zeros(1))
    try:
        assert prepare_ahead(task.training[:4], task.training[4:], task, steps) is None
    finally:
        SUFFIXES.forget(".own")
