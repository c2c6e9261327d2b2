"""What the ensemble is compared on: cases that no fold has seen, pair by pair."""

import sys
from pathlib import Path

import numpy as np
import pytest

from volseg.data import load_task, read_splits
from volseg.data.synthetic import make_task

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

from ensemble import compare, describe, hold_out


def test_no_fold_sees_what_is_held_out(tmp_path):
    task = load_task(make_task(tmp_path / "Task00_Synthetic", num_cases=9, num_test=0))
    held = {case["case"] for case in hold_out(task, 3, 3, seed=0, file=tmp_path / "new" / "splits.json")}
    splits = read_splits(tmp_path / "new" / "splits.json", [case["case"] for case in task.training])
    assert len(held) == 3
    assert {case["case"] for case in task.training} - held == {name for split in splits for name in split.validation}
    for split in splits:
        assert not held & {*split.training, *split.validation}
    again = hold_out(task, 3, 3, seed=0, file=tmp_path / "again.json")
    assert {case["case"] for case in again} == held
    assert {case["case"] for case in hold_out(task, 3, 3, seed=1, file=tmp_path / "other.json")} != held


def test_a_difference_is_that_of_pairs():
    worse = np.random.default_rng(0).uniform(0.5, 0.9, (12, 2))
    found = compare(worse + 0.01, worse)
    assert found["difference"] == pytest.approx(0.01)
    assert found["low"] == pytest.approx(0.01)  # the spread between cases is no doubt about the difference
    assert (found["cases_better"], found["cases_worse"]) == (12, 0)
    assert found["wilcoxon_p"] == pytest.approx(2 / 2**12)  # all of 12 signs alike, two-sided
    assert compare(worse, worse)["wilcoxon_p"] == 1.0
    means = describe(worse, ["anterior", "posterior"])
    assert means["posterior"]["dice"] == pytest.approx(worse[:, 1].mean())
    assert means["mean"]["low"] < means["mean"]["dice"] < means["mean"]["high"]
