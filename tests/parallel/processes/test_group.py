"""Jobs of real processes start, fail, hang, are killed, restart, and end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ready_python import wait_until

from volseg.errors import ParallelError
from volseg.lifetime import is_running
from volseg.parallel import launch

pytestmark = pytest.mark.usefixtures("ready_python")

SCRIPT = [str(Path(__file__).with_name("job_of_processes.py"))]


def written(folder: Path, name: str) -> list[list]:
    """Return the records of the processes, in any order."""
    return [
        json.loads(line) for file in folder.glob(f"{name}.*") for line in file.read_text(encoding="utf-8").splitlines()
    ]


def assert_nothing_is_left(folder: Path) -> None:
    """Assert that both processes have left their group, and none of its threads was there any more."""
    threads = written(folder, "threads")
    assert len(threads) == 2
    assert not [name for names in threads for name in names if "gloo" in name]


@pytest.mark.parametrize(
    ("mode", "told", "tracebacks"),
    [
        ("raise", r"process 1 of 2 \(\S+, \S+\): KeyError: 'something of ours' \(see its traceback\)", 1),
        ("kill", r"process 1 of 2 \(.*\) was killed by SIGKILL: the usual cause is a lack of memory.*", 0),
    ],
)
def test_an_error_is_told_first_and_once(
    mode: str, told: str, tracebacks: int, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    with pytest.raises(ParallelError) as raised:
        launch([*SCRIPT, mode, str(tmp_path)], 2)
    assert re.fullmatch(told, str(raised.value), re.DOTALL)
    shown = capfd.readouterr().err
    assert shown.count("Traceback") == tracebacks
    assert "gloo" not in shown
    assert not [pid for pid, *_ in written(tmp_path, "start") if is_running(pid)]


def test_a_collective_that_hangs_is_an_error_that_says_who_is_where(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    with pytest.raises(ParallelError) as told:
        launch([*SCRIPT, "hang", str(tmp_path)], 2)
    assert "no process has made progress for" in str(told.value)
    assert re.search(r"process 0 of 2 \(\S+, \S+\): start\n", str(told.value))
    assert re.search(r"process 1 of 2 \(\S+, \S+\): train, epoch 3, batch 17\n", str(told.value))
    shown = capfd.readouterr().err
    assert "time.sleep(600)" in shown
    assert "dist.all_reduce(total)" in shown
    assert not [pid for pid, *_ in written(tmp_path, "start") if is_running(pid)]


def test_processes_are_started_again_and_meet_each_other(tmp_path: Path) -> None:
    launch([*SCRIPT, "again", str(tmp_path)], 2, max_restarts=3)
    starts = written(tmp_path, "start")
    assert sorted(start[2] for start in starts) == [0, 0, 1, 1, 2, 2]
    assert {start[3] for start in starts} == {2.0}
    assert_nothing_is_left(tmp_path)


LAUNCHERS = {
    "launch": [sys.executable, "-c", "import sys; from volseg.parallel import launch; launch(sys.argv[1:], 2)"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
def test_nobody_outlives_a_killed_launcher(start, launcher: list[str], tmp_path: Path) -> None:
    job = start([*launcher, *SCRIPT, "stay", str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(written(tmp_path, "start")) == 2, 180)
        pids = [pid for pid, *_ in written(tmp_path, "start")]
        if launcher is LAUNCHERS["launch"]:
            # Held as a whole for longer than the timeout: nothing has happened.
            for number, seconds in ((signal.SIGSTOP, 6), (signal.SIGCONT, 3)):
                for pid in (*pids, job.pid):
                    os.kill(pid, number)
                time.sleep(seconds)
            assert all(map(is_running, pids))
    finally:
        job.kill()
        job.wait()
    wait_until(lambda: not any(map(is_running, pids)), 60)


def run_step(start, number: str, mode: str, folder: Path) -> None:
    """Run two tasks as a step of Slurm, to a good end."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": number, "SLURM_STEP_NUM_TASKS": "2"}
    step["SLURM_STEP_NODELIST"] = "localhost"
    command = [sys.executable, *SCRIPT, mode, str(folder)]
    tasks = [start(command, env={**os.environ, **step, "SLURM_PROCID": n, "SLURM_LOCALID": n}) for n in "01"]
    assert [task.wait(180) for task in tasks] == [0, 0]


def test_slurms_variables_are_enough_and_a_long_reading_is_no_hang(start, tmp_path: Path) -> None:
    # One of the two reads twice as long as the timeout, while the other waits for it in a collective.
    run_step(start, "0", "read", tmp_path)
    assert [start[2:] for start in written(tmp_path, "start")] == [[0, 2.0]] * 2
    assert_nothing_is_left(tmp_path)


def assert_both_began_anew(folder: Path) -> None:
    """Assert that two processes ran twice, resumed, and that the first to fail reported its cause."""
    starts = written(folder, "start")
    assert sorted(start[2] for start in starts) == [0, 0, 1, 1]
    assert {start[3] for start in starts} == {2.0}
    assert len({start[0] for start in starts}) == 2
    told = written(folder, "told")
    assert len(told) == 4
    assert len([rank for rank, _ in told if rank is not None]) == 1
    assert not any(was_left_open for _, was_left_open in told)
    assert_nothing_is_left(folder)


def test_all_begin_anew_after_what_a_job_survives_and_no_launcher_knows(start, tmp_path: Path) -> None:
    job = start([*LAUNCHERS["torchrun"], *SCRIPT, "all anew", str(tmp_path)], stderr=subprocess.PIPE, encoding="utf-8")
    _, errors = job.communicate(timeout=180)
    assert job.returncode == 0, errors
    assert "Traceback" not in errors
    assert_both_began_anew(tmp_path)


def test_they_find_each_other_again_where_the_first_one_keeps_the_store(start, tmp_path: Path) -> None:
    """One fails, and the other waits for it in a collective."""
    run_step(start, "1", "anew", tmp_path)
    assert_both_began_anew(tmp_path)
