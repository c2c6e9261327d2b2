"""Only the leader of the job that holds a run folder's lock writes into it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from in_group import in_group

from volseg.checkpointing import job_folder
from volseg.checkpointing.job_folder import LOCK, JobFolder, only_process_in
from volseg.errors import ConfigError
from volseg.experiment import train
from volseg.experiment.cases import choose_cases
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.run_files import STATUS, TIMES
from volseg.parallel.devices import get_process_rank
from volseg.workflow import Hook


def test_a_member_writes_nothing(configured):
    with ExitStack() as held:
        member, chosen = JobFolder(configured(), held, leads=False), choose_cases(configured())
        assert member.claim(resume=True) is False  # unless the leader says so
        member.begin(chosen, {})
        member.go_on({}, finished=False)
        member.write_json("memory.json", {})
        member.write_status(Heartbeat(), RuntimeError)
        assert not member.folder.path.exists()


def test_the_leader_locks_a_folder_that_is_there_at_once_and_a_new_one_when_it_claims_it(configured):
    config = configured()
    with ExitStack() as held:
        leader = JobFolder(config, held)
        assert not config.folder.exists()
        assert leader.claim(resume=False) is False
        leader.write_status(Heartbeat(), RuntimeError)
        assert {file.name for file in config.folder.iterdir()} == {LOCK, STATUS, TIMES}
    assert not config.folder.exists()  # no run was begun
    with ExitStack() as held:
        leader = JobFolder(config, held)
        assert leader.claim(resume=False) is False
        leader.begin(choose_cases(config), {})
        assert (config.folder / LOCK).exists()
    assert not (config.folder / LOCK).exists()
    with ExitStack() as held:
        leader = JobFolder(config, held)
        assert (config.folder / LOCK).exists()
        with pytest.raises(ConfigError, match="already contains a run"):
            leader.claim(resume=False)
    assert not (config.folder / LOCK).exists()


def begin_in_two_places(config, elsewhere):
    """Begin a run in a folder that the second process does not share, as if its machine had its own disk."""
    job_folder.SECONDS_TO_SEE = 0.5
    if get_process_rank() == 1:
        config = config.model_copy(update={"output": elsewhere})
    with ExitStack() as held:
        job = JobFolder(config, held)
        try:
            job.begin(choose_cases(config), {})
        except ConfigError as refused:
            return str(refused)
    return None


def test_a_machine_that_does_not_see_the_run_folder_is_named(configured, tmp_path):
    config = configured()
    told = in_group(2, begin_in_two_places, config, tmp_path / "elsewhere")
    assert "cannot see the run folder" in told[0]
    assert all("choose one with --output on a file system that all machines of the job share" in one for one in told)
    shutil.rmtree(config.folder, ignore_errors=True)
    assert in_group(2, begin_in_two_places, config, config.folder) == [None, None]
    assert not (config.folder / LOCK).exists()


HOLD = """
import sys, time
from pathlib import Path
from volseg.checkpointing.job_folder import only_process_in
with only_process_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(start, tmp_path):
    """Return another process that holds ``tmp_path/run``."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = start(command, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def hold(folder: Path) -> None:
    with only_process_in(folder):
        assert json.loads((folder / LOCK).read_text(encoding="utf-8"))["pid"] == os.getpid()


def test_a_folder_in_use_is_refused_by_the_name_of_its_user(holder, tmp_path, configured):
    with pytest.raises(ConfigError, match=rf"in use by process {holder.pid} on .*; wait until it ends, or choose"):
        hold(tmp_path / "run")
    with pytest.raises(ConfigError, match="is in use by process"):
        train(configured())
    with pytest.raises(ConfigError, match="is in use by process"):
        train(configured(), resume=True)


def test_the_lock_of_a_killed_process_is_none(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / LOCK).exists()
    hold(tmp_path / "run")


def test_neither_lock_nor_empty_folder_is_left(tmp_path):
    hold(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")  # rmdir refuses it, and a mount point: once that hid the reason of an end
    hold(tmp_path / "link")
    assert list((tmp_path / "disk").iterdir()) == []
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    hold(tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]


def no_locks(*arguments):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_where_there_are_no_locks_a_training_runs_and_that_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(job_folder.fcntl, "flock", no_locks)
    with caplog.at_level("INFO"):
        hold(tmp_path / "run")
    assert "run cannot be locked" in caplog.text
    assert "No locks" in caplog.text
    assert not (tmp_path / "run").exists()


def test_a_training_holds_its_folder_to_the_end(configured):
    class Second(Hook):
        def on_epoch_end(self, training, record):
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
                train(configured(), resume=True)

    outcome = train(configured(), hooks=[Second()])
    assert len(outcome.history) == 2
    assert not (outcome.folder.path / LOCK).exists()
