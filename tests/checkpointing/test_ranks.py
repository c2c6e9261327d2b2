"""The leader keeps the run folder; a member leaves it as it is."""

import shutil
from contextlib import ExitStack

import pytest
from in_group import in_group

from volseg.checkpointing import ranks
from volseg.checkpointing.lock import LOCK
from volseg.checkpointing.ranks import JobFolder
from volseg.errors import ConfigError
from volseg.experiment.cases import choose_cases
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.run_files import STATUS, TIMES
from volseg.parallel.devices import get_process_rank


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
        with pytest.raises(ConfigError, match="holds a run already"):
            leader.claim(resume=False)
    assert not (config.folder / LOCK).exists()


def begin_in_two_places(config, elsewhere):
    """Begin a run whose folder is another one for the second process, as if its machine had a disk of its own."""
    ranks.SECONDS_TO_SEE = 0.5
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
    assert "does not see the run folder" in told[0]
    assert all("choose one by --output on a file system that all machines of the job share" in one for one in told)
    shutil.rmtree(config.folder, ignore_errors=True)
    assert in_group(2, begin_in_two_places, config, config.folder) == [None, None]
    assert not (config.folder / LOCK).exists()
