"""The leader keeps the run folder; a member leaves it as it is. A reader reads, a follower is sent its slabs."""

import shutil
from contextlib import ExitStack

import pytest
import torch
from in_group import in_group
from torch import nn

from volseg.errors import ConfigError
from volseg.experiment import roles
from volseg.experiment.cases import choose_cases
from volseg.experiment.folder_lock import LOCK
from volseg.experiment.reading import Follower, Reader, choose_reading
from volseg.experiment.roles import Leader, Member, choose_role
from volseg.experiment.settling import settle_mesh
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.run_files import STATUS, TIMES
from volseg.parallel.devices import find_rank


def test_one_process_leads_and_reads(configured):
    with ExitStack() as held:
        assert type(choose_role(configured(), held)) is Leader
    _, mesh = settle_mesh(configured(), choose_cases(configured()).task, "cpu")
    assert type(choose_reading(configured(), mesh)) is Reader


def test_a_member_writes_nothing(configured):
    member, chosen = Member(configured()), choose_cases(configured())
    assert member.claim(resume=True) is False  # unless the leader says so
    member.begin(chosen)
    member.go_on(finished=False)
    member.forget_validation()
    assert not member.folder.path.exists()


def read(config):
    """Prepare the cases; a follower's batches are sent, and of a model that is not shared it can have none."""
    chosen = choose_cases(config)
    settled, mesh = settle_mesh(config, chosen.task, torch.device("cpu"))
    reading = choose_reading(settled, mesh)
    prepared = reading.prepare(chosen)
    if type(reading) is Follower:
        with pytest.raises(AssertionError, match="a follower of a model that is not shared"):
            reading.make_batches(prepared, chosen.task, nn.Conv3d(1, 1, 1), torch.device("cpu"))
    return {
        "role": type(reading).__name__,
        "training": len(prepared.training),
        "validation": len(prepared.validation),
        "order": len(prepared.order),
    }


def test_a_follower_reads_no_case(configured):
    leader, follower = in_group(2, read, configured("parallel.spatial=2"))
    assert leader == {"role": "Reader", "training": 4, "validation": 2, "order": 2}
    assert follower == {"role": "Follower", "training": 0, "validation": 0, "order": 2}


def test_the_leader_locks_a_folder_that_is_there_at_once_and_a_new_one_when_it_claims_it(configured):
    config = configured()
    with ExitStack() as held:
        leader = Leader(config, held)
        assert not config.folder.exists()
        assert leader.claim(resume=False) is False
        leader.show_life(Heartbeat(), RuntimeError)
        assert {file.name for file in config.folder.iterdir()} == {LOCK, STATUS, TIMES}
    assert not config.folder.exists()  # no run was begun
    with ExitStack() as held:
        leader = Leader(config, held)
        assert leader.claim(resume=False) is False
        leader.begin(choose_cases(config))
        assert (config.folder / LOCK).exists()
    assert not (config.folder / LOCK).exists()
    with ExitStack() as held:
        leader = Leader(config, held)
        assert (config.folder / LOCK).exists()
        with pytest.raises(ConfigError, match="holds a run already"):
            leader.claim(resume=False)
    assert not (config.folder / LOCK).exists()


def begin_in_two_places(config, elsewhere):
    """Begin a run whose folder is another one for the second process, as if its machine had a disk of its own."""
    roles.SECONDS_TO_SEE = 0.5
    if find_rank() == 1:
        config = config.model_copy(update={"output": elsewhere})
    with ExitStack() as held:
        role = choose_role(config, held)
        try:
            role.begin(choose_cases(config))
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
    assert not (config.folder / roles.SEEN).exists()
