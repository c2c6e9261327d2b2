"""Every operator and module of torch's own test database on volumes: equal to torch or refused, never wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("operator_database.py")
UNAVAILABLE = 77


def compare(*options: str, seconds: int) -> None:
    """Run the comparison in a process of its own: torch's database changes global settings when it is imported."""
    # Modules beside the script are found by Python itself; volseg must be the one that this process tests.
    import volseg

    environment = {**os.environ, "PYTHONPATH": str(Path(volseg.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, env=environment, timeout=seconds
    )
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]


def test_two_samples_of_each_operator_are_equal_or_refused() -> None:
    compare("--thin", seconds=500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sample_of_each_operator_is_equal_or_refused() -> None:
    compare("--jobs", "2", seconds=3500)
