"""How the processes of a training end: one that is killed, one that fails, a launcher that is killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ready_python
from ready_python import wait_until

from volseg.lifetime import is_running
from volseg.workflow import load_checkpoint

pytestmark = pytest.mark.usefixtures("ready_python")

ENDLESS = ["--set", "training.epochs=100000"]


TOLD = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}


def volseg(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "volseg", *arguments]


def children(process: subprocess.Popen) -> list[int]:
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    names = {pid: Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() for pid in pids}
    return [int(pid) for pid, name in names.items() if name != ready_python.NAME]  # which is one of the tests' own


def test_a_killed_process_is_started_again_and_the_job_goes_on(start, config_file, tmp_path):
    mesh = ["--set", "device=cpu", "--set", "parallel.spatial=2"]
    mesh += ["--set", "training.epochs=8", "--set", "training.checkpoint_minutes=0.001"]
    job = start(volseg("train", str(config_file), *mesh, "--gpus", "2", "--max-restarts", "1"), **TOLD)
    wait_until(lambda: (tmp_path / "run" / "checkpoints" / "latest.pt").exists(), 120)
    killed = children(job)[-1]
    os.kill(killed, signal.SIGKILL)
    told, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert "| mean " in told
    history = load_checkpoint(tmp_path / "run" / "checkpoints" / "latest.pt").history
    assert [record.epoch for record in history] == list(range(8))


KILLED = """
import os, signal
import volseg
from volseg.parallel.devices import count_restarts

@volseg.register("hook", "Killed")
class Killed(volseg.Hook):
    def on_batch_end(self, training, fields):
        if training.epoch == 1 and count_restarts() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_single_process_is_started_again_too(start, config_file, tmp_path):
    """The option was passed over where there was one process."""
    (tmp_path / "killed.py").write_text(KILLED, encoding="utf-8")
    settings = ["--set", "hooks=[{name: Killed}]", "--set", "training.checkpoint_minutes=0.0001"]
    command = volseg("train", str(config_file), *settings, "--components", str(tmp_path / "killed.py"))
    job = start([*command, "--max-restarts", "1"], **TOLD)
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert "was killed by SIGKILL" in errors
    assert "restarting all processes, 1 of 1 times" in errors
    history = load_checkpoint(tmp_path / "run" / "checkpoints" / "latest.pt").history
    assert [record.epoch for record in history] == [0, 1]


def test_an_error_is_told_once_and_without_gloo(start, config_file):
    settings = ["--set", "device=cpu", "--set", "parallel.spatial=2", "--set", "optimizer.lr=1e30"]
    job = start(volseg("train", str(config_file), "--gpus", "2", *settings), **TOLD)
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 1
    assert "Traceback" not in errors
    assert "gloo" not in errors
    last = errors.rstrip().splitlines()[-1]
    assert re.match(r"volseg: process [01] of 2 \(\S+, cpu\): the loss is not finite in epoch 1", last), last
    assert errors.count("the loss is not finite") <= 2  # by the other process, in a line, if it lives to say so


def test_no_fold_outlives_a_killed_cross_validation(start, config_file, tmp_path):
    """Those of a training are the launcher's, as in parallel/processes/test_group.py."""
    folds = ["--folds", "0", "1", "--gpus", "2", "--set", "device=cpu"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = start(volseg("cross-validate", str(config_file), *folds, *ENDLESS), **quiet)
    try:
        wait_until(lambda: len(list(tmp_path.rglob("config.yaml"))) == 2 and len(children(job)) == 2, 120)
        pids = children(job)
    finally:
        job.kill()
        job.wait()
    wait_until(lambda: not any(map(is_running, pids)), 30)


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core follows in the process itself")
def test_a_plan_that_is_interrupted_leaves_no_copies(start, request):
    vnet = request.config.rootpath / "configs" / "task04_vnet.yaml"
    # Many ways to look at, so that it is still at it when it hears of Ctrl-C, which a terminal sends to all.
    job = start(volseg("plan", str(vnet), "--instance", "p3.16xlarge", "--max-volume"), **TOLD, start_new_session=True)
    try:
        # Two, as one may be the tests' own, which has another name at first.
        wait_until(lambda: job.poll() is not None or len(children(job)) > 1, 120)
        copies = children(job)
        os.killpg(job.pid, signal.SIGINT)
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 130, errors
    assert errors.splitlines()[-1] == "volseg: interrupted; run the same command again"
    assert copies
    wait_until(lambda: not any(map(is_running, copies)), 30)
