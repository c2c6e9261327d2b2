import getpass
import os
import pwd
import signal
import subprocess
import sys
import time

import pytest

from volseg.files import choose_cache_folder, remove_partials, replacing
from volseg.importing import name_user


def test_a_block_that_ends_well_replaces_the_file(tmp_path):
    path = tmp_path / "new" / "state.bin"
    for content in (b"first", b"second"):
        with replacing(path) as partial:
            partial.write_bytes(content)
            assert not path.exists() or path.read_bytes() == b"first"
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", [OSError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_file_and_nothing_else(tmp_path, fault):
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")

    def interrupted():
        with replacing(path) as partial:
            partial.write_bytes(b"hal")
            raise fault

    with pytest.raises(fault):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.bin"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "state.bin"):
        pass
    assert not os.listdir(tmp_path)


def test_two_writers_of_one_thread_id_as_in_two_containers_do_not_mix(tmp_path):
    path = tmp_path / "search.json"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("1", encoding="utf-8")
        second.write_text("22", encoding="utf-8")
    assert (path.read_text(encoding="utf-8"), os.listdir(tmp_path)) == ("1", ["search.json"])


def test_a_user_without_an_account_has_a_name_and_no_cache(monkeypatch):
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.delenv("HOME")
    for name in ("LOGNAME", "USER", "XDG_CACHE_HOME", "VOLSEG_CACHE"):
        monkeypatch.setenv(name, "")
    name_user()
    assert getpass.getuser() == str(os.getuid())  # MONAI's import asks
    assert choose_cache_folder("auto") is None  # once a folder called ~ in the working folder
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("XDG_CACHE_HOME", "~/.cache"), ("VOLSEG_CACHE", "~/.cache/volseg")):  # no shell expands them
        monkeypatch.setenv(name, value)
        assert str(choose_cache_folder("auto")) == "/home/me/.cache/volseg"


@pytest.mark.parametrize("links", [True, False])
def test_the_file_of_before_keeps_a_name(tmp_path, monkeypatch, links):
    def refuse(*names):
        raise PermissionError(1, "Operation not permitted")  # as vfat and some network file systems answer

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    for content in (b"1", b"2", b"3"):
        with replacing(path, previous=previous) as partial:
            partial.write_bytes(content)
    assert (path.read_bytes(), previous.read_bytes()) == (b"3", b"2")
    assert sorted(os.listdir(tmp_path)) == ["latest.pt", "previous.pt"]


def test_two_names_of_one_file_which_a_kill_may_leave_are_parted_again(tmp_path):
    path, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    path.write_bytes(b"1")
    os.link(path, previous)
    with replacing(path, previous=previous) as partial:
        partial.write_bytes(b"2")
    assert (path.read_bytes(), previous.read_bytes()) == (b"2", b"1")
    assert sorted(os.listdir(tmp_path)) == ["latest.pt", "previous.pt"]


def test_only_partial_files_are_removed(tmp_path):
    kept = ["latest.pt", ".hidden", ".x.partial", "a.5.partial", ".latest.pt.12.partial.txt"]
    for name in [*kept, ".latest.pt.1a2b3c4.partial", ".config.yaml.0000009.partial"]:
        (tmp_path / name).touch()
    remove_partials(tmp_path, latest=time.time() - 3600)  # another process may still write them
    assert len(os.listdir(tmp_path)) == len(kept) + 2
    kept.append(".bundle.0a1b2c3.partial")
    (tmp_path / kept[-1]).mkdir()  # of a killed export: the training could not be resumed
    remove_partials(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


KILLED = """
import os, signal, sys
from volseg import files
step, names = int(sys.argv[1]), ("link", "replace", "fsync")
calls = 0
def counted(real):
    def call(*arguments):
        global calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call
for name in names:
    setattr(os, name, counted(getattr(os, name)))
with files.replacing(sys.argv[2], previous=sys.argv[3]) as partial:
    partial.write_bytes(b"new")
"""


@pytest.mark.parametrize("step", range(1, 7))
def test_a_kill_before_any_step_of_the_replacement_leaves_a_whole_file(tmp_path, step):
    path, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    path.write_bytes(b"old")
    previous.write_bytes(b"older")
    command = [sys.executable, "-c", KILLED, str(step), str(path), str(previous)]
    ended = subprocess.run(command, check=False).returncode
    assert ended == (-signal.SIGKILL if step < 6 else 0)
    assert (path.read_bytes(), previous.read_bytes()) in [(b"old", b"older"), (b"old", b"old"), (b"new", b"old")]
    remove_partials(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest.pt", "previous.pt"]
