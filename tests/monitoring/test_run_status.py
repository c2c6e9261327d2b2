"""The output and exit status of `volseg status`."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.monitoring.run_files import (
    STATUS,
    RunStatus,
    list_run_folders,
    look_at,
    read_process_namespace,
    write_status,
)

HERE = RunStatus(
    state="training",
    time=0.0,
    started=0.0,
    host=socket.gethostname(),
    pid=os.getpid(),
    process_space=read_process_namespace(),
    epoch=3,
    epochs=10,
    batch=20,
    batches=250,
    loss=0.25,
    score=0.875,
    best=0.9,
    seconds_left=4000.0,
    voxels_per_second=45.5e6,
    memory_gib=8.25,
)
ELSEWHERE = replace(HERE, host="another-machine", pid=1)


def make_run(folder, status, *, age=0.0):
    """Write the status of a run with a heartbeat of this age."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("name: a\n", encoding="utf-8")
    if status is not None:
        write_status(folder / STATUS, replace(status, time=time.time() - age))
    return folder


def ask(*arguments):
    done = CliRunner().invoke(app, ["status", *map(str, arguments)])
    return done.exit_code, done.output


def test_a_running_training_says_how_far_it_is(tmp_path):
    status, said = ask(make_run(tmp_path / "run", HERE, age=3.0), "--max-age", "10m")
    assert status == 0
    parts = ("3 of 10 done, batch 20 of 250", "loss 0.2500, Dice 0.8750, best 0.9000", "1 h 6 min left")
    assert all(part in said for part in ("training", *parts))
    assert re.search(rf"\d s ago, by process {os.getpid()} on {re.escape(socket.gethostname())}", said)


def test_an_old_sign_of_life_is_a_fault_only_where_an_age_is_asked_for(tmp_path):
    run = make_run(tmp_path / "run", ELSEWHERE, age=3600.0)
    assert ask(run)[0] == 0
    status, said = ask(run, "--max-age", "10m")
    assert status == 1
    assert re.search(r"the last heartbeat is 1 h( \d+ \w+)? old", said)  # later on a busy machine
    assert ask(run, "--max-age", "2h")[0] == 0


def test_of_a_run_on_another_machine_no_process_is_looked_for(tmp_path):
    """Its number may be anybody's here, or nobody's."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run = make_run(tmp_path / "run", replace(ELSEWHERE, pid=gone.pid))
    assert not look_at(run).is_gone
    in_a_container = make_run(tmp_path / "other", replace(HERE, pid=gone.pid, process_space="pid:[1]"))
    assert not look_at(in_a_container).is_gone
    here = make_run(tmp_path / "here", replace(HERE, pid=gone.pid))
    status, said = ask(here, "--max-age", "10m")
    assert status == 1
    assert f"process {gone.pid} died without a message" in said


@pytest.mark.parametrize(
    ("state", "expected"), [("finished", 0), ("interrupted", 0), ("failed", 1), ("preparing", 1), ("validating", 1)]
)
def test_what_has_ended_grows_not_stale(tmp_path, state, expected):
    run = make_run(tmp_path / "run", replace(ELSEWHERE, state=state, message="a fault"), age=1e6)
    status, said = ask(run, "--max-age", "10m")
    assert status == expected
    assert ("failed: a fault" in said) == (state == "failed")


def test_no_run_is_an_exit_status_of_its_own(tmp_path):
    assert ask(tmp_path)[0] == 2
    assert ask(tmp_path / "nowhere")[0] == 2
    assert ask(make_run(tmp_path / "old", None))[0] == 0
    assert ask(tmp_path / "old", "--max-age", "1h")[0] == 1


def test_each_fold_of_a_cross_validation_is_told(tmp_path):
    for number, state in ((10, "training"), (2, "finished"), (0, "failed")):
        make_run(tmp_path / f"fold_{number}", replace(ELSEWHERE, state=state, message="a fault"))
    (tmp_path / "fold_0.yaml").write_text("", encoding="utf-8")
    assert [run.name for run in list_run_folders(tmp_path)] == ["fold_0", "fold_2", "fold_10"]
    status, said = ask(tmp_path, "--json", "--max-age", "10m")
    assert status == 1
    told = json.loads(said)
    assert [run["state"] for run in told["runs"]] == ["failed", "finished", "training"]
    assert told["faults"] == ["failed: a fault"]
    assert told["runs"][2]["epoch"] == 3
    assert told["runs"][2]["age_seconds"] >= 0


def test_it_answers_without_torch(tmp_path):
    run = make_run(tmp_path / "run", HERE)
    code = (
        "import sys\n"
        f"sys.argv = ['volseg', 'status', {str(run)!r}]\n"
        "from volseg.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'monai', 'numpy', 'tensorboard'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("age", ["", "soon", "-1m", "infd"])
def test_an_age_that_is_none_is_refused(tmp_path, age):
    done = CliRunner().invoke(app, ["status", str(make_run(tmp_path / "run", HERE)), "--max-age", age])
    assert done.exit_code == 2, "not 1, which says that the training hangs"
    assert "such as 10m" in " ".join(done.output.split())
