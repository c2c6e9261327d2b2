"""The rank and number of processes, from the launcher's environment variables."""

import pytest

from volseg.launched import find_first_node, read_launch

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "seven",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BATCH_SHELL = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
STEP = {
    **BATCH_SHELL,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_torchruns_variables():
    launch = read_launch(TORCHRUN)
    assert (launch.rank, launch.local_rank, launch.world_size) == (5, 1, 8)
    assert (launch.address, launch.port, launch.has_store) == ("node7", 29500, True)
    assert (launch.run, launch.restarts) == ("seven", 2)


def test_a_step_of_slurm_with_several_tasks():
    launch = read_launch(STEP)
    assert (launch.rank, launch.local_rank, launch.world_size) == (3, 1, 4)
    assert launch.address == "gpu08"
    assert 10_000 <= launch.port < 30_000
    assert not launch.has_store
    assert launch.port != read_launch({**STEP, "SLURM_STEP_ID": "4"}).port
    assert launch.port != read_launch({**STEP, "SLURM_JOB_ID": "4712"}).port
    named = read_launch({**STEP, "MASTER_ADDR": "login", "MASTER_PORT": "29501"})
    assert (named.address, named.port) == ("login", 29501)
    assert read_launch({**STEP, "SLURM_RESTART_COUNT": "2"}).restarts == 2  # the job was queued again


def test_torchrun_in_a_step_counts_first():
    assert read_launch({**STEP, **TORCHRUN}).rank == 5


@pytest.mark.parametrize(
    "environment",
    [{}, BATCH_SHELL, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_NUM_TASKS": "4"}, {"RANK": "1"}],
    ids=["nothing", "shell of a batch script", "step of one task", "half of a step", "no local rank"],
)
def test_a_process_alone(environment):
    assert read_launch(environment) is None


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("gpu5", "gpu5"),
        ("node[01-03,07],gpu5", "node01"),
        ("a[8-10]", "a8"),
        ("r[1-2]n[3,1].cluster", "r1n3.cluster"),
        ("a-1,b-[2]-c", "a-1"),
    ],
)
def test_the_first_of_a_list_of_nodes(written, name):
    assert find_first_node(written) == name
