"""What one machine trains, two train together: the same weights; and what happens there when one is lost."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ready_python import wait_until
from two_machines import ADDRESSES, Machines, on_two_machines, why_not

from tests.experiment.conftest import latest
from volseg.experiment import train

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

JOB = str(Path(__file__).parents[1] / "parallel" / "processes" / "job_of_processes.py")


@pytest.fixture
def machines():
    with on_two_machines() as made:
        yield made


def outputs(jobs, seconds):
    """Wait for the launchers; return the error stream of each."""
    end = time.monotonic() + seconds
    return [job.communicate(timeout=end - time.monotonic())[1] for job in jobs]


def assert_same_weights(machines: Machines, mesh: str, per_machine: int, configured, config_file, tmp_path) -> None:
    plain = latest(train(configured(f"output={tmp_path / 'plain'}")).folder.path)
    command = ["-m", "volseg", "train", str(config_file), "--set", f"parallel={mesh}"]
    jobs = machines.torchrun(command, per_machine=per_machine, stderr=subprocess.PIPE, encoding="utf-8")
    shown = outputs(jobs, 300)
    assert [job.returncode for job in jobs] == [0, 0], shown
    both = latest(tmp_path / "run")
    # float32: sums over shards add up in another order, and six optimizer steps carry that on.
    torch.testing.assert_close(both.model, plain.model, rtol=1e-3, atol=1e-5)
    assert (tmp_path / "run" / "report.md").exists()


def test_two_machines_cut_volumes(machines, configured, config_file, tmp_path):
    assert_same_weights(machines, "{spatial: 2}", 1, configured, config_file, tmp_path)


@pytest.mark.slow
def test_two_machines_deal_batches_and_cut_volumes(machines, configured, config_file, tmp_path):
    assert_same_weights(machines, "{data: 2, spatial: 2}", 2, configured, config_file, tmp_path)


def test_both_launchers_start_again_what_one_has_lost(machines, tmp_path):
    # The launcher of the first machine joins again without counting an attempt, in a store that knows the dead.
    jobs = machines.torchrun([JOB, "again", str(tmp_path)], max_restarts=2, stderr=subprocess.PIPE, encoding="utf-8")
    shown = outputs(jobs, 200)
    assert [job.returncode for job in jobs] == [0, 0], shown
    lines = [line for file in tmp_path.glob("start.*") for line in file.read_text(encoding="utf-8").splitlines()]
    assert sorted(json.loads(line)[2:] for line in lines) == [[count, 2.0] for count in (0, 0, 1, 1, 2, 2)]


def test_the_machine_that_is_cut_off_ends_too(machines, tmp_path):
    """Its processes waited for the store without limit: a cut cable closes no connection."""
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29418"}
    jobs = []
    for number in range(2):
        given = [f"{name}={value}" for name, value in {**variables, "RANK": number, "TIMEOUT": "10"}.items()]
        command = ["env", *given, sys.executable, JOB, "stay", str(tmp_path)]
        jobs.append(machines.start(number, command, stderr=subprocess.PIPE, encoding="utf-8"))
    wait_until(lambda: len(list(tmp_path.glob("start.*"))) == 2, 200)
    machines.cut()
    told = outputs(jobs, 200)
    assert [job.returncode for job in jobs] == [1, 1], told
    assert "process 1 of 2 (machine2, cpu) sends no heartbeat for" in told[0]
    assert "volseg: process 1 of 2 (machine2, cpu) is cut off: the store of this job has not answered for" in told[1]
    assert "Traceback" not in told[1]
