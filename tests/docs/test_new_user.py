"""A new user's path: the commands of the tutorial, typed into a shell in a fresh clone.

What is marked there as not run is left out: the installation, in whose place is the interpreter of these tests, and
what needs the internet, for which the data set lies where it would be.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT, read_blocks

from volseg.data.mock_msd import make_mock_task

BLOCKS = read_blocks(ROOT / "docs" / "tutorial.md", "sh")


@pytest.fixture
def clone(tmp_path) -> Path:
    """Return a clone of the repository as the working tree has it, and a data set in it."""
    place = tmp_path / "volseg"
    subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
    told = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(told, cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place / name)
    make_mock_task(place / "Task04_Hippocampus", "Task04_Hippocampus", num_cases=10, num_test=2)
    return place


@pytest.fixture
def shell(clone, tmp_path) -> dict[str, str]:
    """Return an environment whose `volseg` is the clone's, as in an active virtual environment."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "volseg"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m volseg "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    # As many threads as these tests have: beside others, threads that wait for each other take most of the time.
    return {**os.environ, "PATH": path, "PYTHONPATH": str(clone), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tutorial_runs_as_it_is_written(clone, shell):
    typed = "\n".join(block.text for block in BLOCKS if not block.reason)
    log = clone.parent / "said.txt"  # to be looked at while it goes on
    with log.open("wb") as said:
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", typed], cwd=clone, env=shell, stdout=said, stderr=said, check=False
        )
    told = log.read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, told[-3000:]
    assert (clone / "runs" / "quickstart_again" / "report.md").exists()
    assert len([*(clone / "predictions").glob("*.nii.gz")]) == 2
    assert len([*(clone / "my_predictions").glob("*.nii.gz")]) == 2
    assert "all 12 cases of Task04_Hippocampus can be used" in told
    report = (clone / "runs" / "my_task" / "report.md").read_text(encoding="utf-8")
    assert "; epochs 2;" in report
    assert " in 2 parts, as the training was resumed" in report
