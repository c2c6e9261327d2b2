"""Two processes never write into one run folder, and a lock that nobody holds is none."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from volseg.checkpointing import lock
from volseg.checkpointing.lock import LOCK, only_process_in
from volseg.errors import ConfigError
from volseg.experiment import train
from volseg.workflow import Hook

HOLD = """
import runpy, sys, time
from pathlib import Path
only_process_in = runpy.run_path(sys.argv[2])["only_process_in"]  # alone: the package takes seconds to import
with only_process_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(start, tmp_path):
    """Return another process that holds ``tmp_path/run``."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run"), lock.__file__]
    process = start(command, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def hold(folder: Path) -> None:
    with only_process_in(folder):
        assert json.loads((folder / LOCK).read_text(encoding="utf-8"))["pid"] == os.getpid()


def test_a_folder_in_use_is_refused_by_the_name_of_its_user(holder, tmp_path, configured):
    with pytest.raises(ConfigError, match=rf"run is in use by process {holder.pid} on .*; wait for its end, or choose"):
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
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    hold(tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]


def no_locks(*arguments):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    ("there", "cause"), [(None, "Windows"), (SimpleNamespace(flock=no_locks, LOCK_EX=2, LOCK_NB=4), "No locks")]
)
def test_where_there_are_no_locks_a_training_runs_and_that_is_said(tmp_path, monkeypatch, caplog, there, cause):
    monkeypatch.setattr(lock, "fcntl", there)
    monkeypatch.delattr(os, "pwrite")  # as on Windows
    with caplog.at_level("INFO"):
        hold(tmp_path / "run")
    assert "run cannot be locked" in caplog.text
    assert cause in caplog.text
    assert not (tmp_path / "run").exists()


def test_a_training_holds_its_folder_to_the_end(configured):
    class Second(Hook):
        def on_epoch_end(self, training, record):
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
                train(configured(), resume=True)

    outcome = train(configured(), hooks=[Second()])
    assert len(outcome.history) == 2
    assert not (outcome.folder.path / LOCK).exists()
