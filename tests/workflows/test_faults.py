"""The benchmark of faults compares the results of two trainings, without what depends on the wall clock."""

import os
import time
from pathlib import Path

import faults
import torch
from faults import fingerprint
from tiny_trainings import make_training
from torch import nn


def train_in(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    make_training(nn.Conv3d(1, 2, 1), folder / "checkpoints", 2).run()
    return fingerprint(folder)


def test_two_runs_of_one_training_have_one_fingerprint(tmp_path: Path) -> None:
    """Epochs record speeds and validation times, which differ between runs."""
    fingerprints = [train_in(tmp_path / name, seed) for name, seed in (("one", 0), ("again", 0), ("other", 1))]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def leave_a_child(*_: object) -> None:
    """End at once; a child with all pipes of this process survives."""
    if os.fork() == 0:
        time.sleep(20)
    os._exit(3)


def test_a_training_has_ended_when_its_own_process_has(monkeypatch, tmp_path: Path) -> None:
    """Forks held the pipe by which `multiprocessing` waits: trainings ended late, and killed ones seemed to run."""
    monkeypatch.setattr(faults, "_train", leave_a_child)
    begin = time.monotonic()
    assert faults.Sitting([], tmp_path / "log").wait(60) == 3
    assert time.monotonic() - begin < 15
