"""The leader reads and writes; a follower leaves the folder as it is."""

from contextlib import ExitStack

import pytest
from torch import nn

from volseg.errors import ConfigError
from volseg.experiment.cases import choose_cases
from volseg.experiment.folder_lock import LOCK
from volseg.experiment.roles import Follower, Leader, choose_role


def test_one_process_leads(configured):
    with ExitStack() as held:
        assert type(choose_role(configured(), held)) is Leader


def test_a_follower_reads_no_case_and_writes_nothing(configured):
    follower, chosen = Follower(configured()), choose_cases(configured())
    assert follower.claim(resume=True) is False  # unless the leader says so
    prepared = follower.prepare(chosen)
    assert (prepared.training, prepared.validation, prepared.problems) == ((), (), ())
    follower.begin(chosen)
    follower.go_on(finished=False)
    follower.forget_validation()
    assert not follower.folder.path.exists()
    with pytest.raises(AssertionError, match="a follower of a model that is not shared"):
        follower.make_batches(prepared.training, chosen.task, nn.Conv3d(1, 1, 1), "cpu")


def test_the_leader_locks_a_folder_that_is_there_at_once_and_a_new_one_when_it_begins(configured):
    config = configured()
    with ExitStack() as held:
        leader = Leader(config, held)
        assert leader.claim(resume=False) is False
        assert not config.folder.exists()
        leader.begin(choose_cases(config))
        assert (config.folder / LOCK).exists()
    assert not (config.folder / LOCK).exists()
    with ExitStack() as held:
        leader = Leader(config, held)
        assert (config.folder / LOCK).exists()
        with pytest.raises(ConfigError, match="holds a run already"):
            leader.claim(resume=False)
    assert not (config.folder / LOCK).exists()
