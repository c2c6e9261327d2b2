"""Jobs that ended with a wrong status or without a reason."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from training_hooks import At

from tests.experiment.conftest import write_config
from volseg.checkpointing.file import load_checkpoint
from volseg.data.layouts import load_task
from volseg.data.synthetic import make_task
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.experiment import load_config, train
from volseg.experiment.placement import placed_network
from volseg.monitoring.run_files import look_at

# ``--max-restarts`` tried again after a refusal, and the second attempt did not refuse: it trained on the run that the
# command was told to leave alone. A run folder that was removed came back with checkpoints, and without its config.


@pytest.fixture
def config_file(tmp_path):
    task = make_task(tmp_path / "data" / "Task00_Synthetic", num_cases=6, num_test=1)
    return write_config(task, tmp_path)


@pytest.fixture
def stopped_run(config_file, tmp_path):
    """Return the folder of a run that has trained one of the two epochs, and is not finished."""
    train(load_config(str(config_file), ["training.epochs=1"]))
    run = tmp_path / "run"
    shutil.rmtree(run / "validation")
    (run / "report.md").unlink()
    return run


LAUNCHERS = {
    "launch": ["-m", "volseg", "train", "CONFIG", "--gpus", "2", "--set", "device=cpu", "--max-restarts", "1"],
    "torchrun": [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"),
        *("-m", "volseg", "train", "CONFIG"),
    ],
}


@pytest.mark.usefixtures("ready_python")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_refusal_is_none_that_another_attempt_lifts(launcher, stopped_run, config_file):
    command = [str(config_file) if part == "CONFIG" else part for part in LAUNCHERS[launcher]]
    ended = subprocess.run([sys.executable, *command], capture_output=True, encoding="utf-8", timeout=200)
    assert ended.returncode == 1, ended.stderr
    assert "already contains a run" in ended.stderr
    assert load_checkpoint(stopped_run / "checkpoints" / "latest.pt").epoch == 1
    assert not (stopped_run / "report.md").exists()
    if launcher == "launch":
        assert "restarting" not in ended.stderr
        assert ended.stderr.count("already contains a run") <= 2  # by the other process, if it lives to say so
    else:
        assert "a new attempt would fail for the same reason as the previous one" in ended.stderr


@pytest.mark.parametrize(("place", "minutes"), [("gone", 0), ("another's", 5)])
def test_nothing_is_written_to_a_folder_that_was_taken_away(place, minutes, config_file, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    config = load_config(config_file, [f"training.checkpoint_minutes={minutes}"])

    def replace():
        run.rename(moved)
        if place == "another's":
            run.mkdir()
            (run / "in_use.json").write_text("of another training", encoding="utf-8")

    with pytest.raises(CheckpointError, match=r"in_use\.json was removed or replaced while this training ran"):
        train(config, hooks=[At(1, 1, replace)])
    assert [file.name for file in run.glob("*")] == (["in_use.json"] if place == "another's" else [])
    (moved / "in_use.json").unlink()
    moved.rename(run) if place == "gone" else shutil.copytree(moved, run, dirs_exist_ok=True)
    assert len(train(config, resume=True).history) == 2


def test_a_run_does_not_go_on_with_labels_of_another_meaning(stopped_run, config_file, tmp_path):
    """The scores of two structures changed places in the report, and status was 0."""
    manifest = tmp_path / "data" / "Task00_Synthetic" / "dataset.json"
    described = json.loads(manifest.read_text(encoding="utf-8"))
    first, second = described["labels"]["1"], described["labels"]["2"]
    manifest.write_text(
        json.dumps({**described, "labels": {**described["labels"], "1": second, "2": first}}), encoding="utf-8"
    )
    config = load_config(config_file)
    with pytest.raises(DataError, match=rf"labels .*1: '{first}', 2: '{second}'.* -> .*1: '{second}', 2: '{first}'"):
        train(config, resume=True)
    (stopped_run / "task.json").unlink()  # nothing that says what they meant
    assert len(train(config, resume=True).history) == 2


# ``volseg status`` showed gloo's own text of a job whose process was killed: a connection was closed.


KILLED = """
import os, signal
import volseg
from volseg.parallel.devices import get_process_rank

@volseg.register("hook", "Killed")
class Killed(volseg.Hook):
    def on_batch_end(self, training, fields):
        if get_process_rank() == 1 and training.epoch == 1:
            {what}
"""


def run_job(what, start, folder, *settings):
    """Train under torchrun with a process that does something in its second epoch; return the status that is left."""
    (folder / "killed.py").write_text(KILLED.format(what=what), encoding="utf-8")
    config_file = write_config(make_task(folder / "Task00_Synthetic", num_cases=6, num_test=1), folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "volseg"]
    command += ["train", str(config_file), "--components", str(folder / "killed.py")]
    told = ("device=cpu", "hooks=[{name: Killed}]", "training.epochs=9", *settings)
    command += [part for each in told for part in ("--set", each)]
    job = start(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, encoding="utf-8")
    _, errors = job.communicate(timeout=300)
    assert job.returncode != 0
    status = look_at(folder / "run").status
    assert status.state == "failed", errors
    assert "gloo" not in status.message
    return status.message


@pytest.mark.usefixtures("ready_python")
@pytest.mark.parametrize(
    ("what", "settings", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ["parallel.data=2"], r"process 1 of 2 .*, cpu\):? died silently"),
        # The status stayed at the last batch, and its process was gone.
        (
            "signal.pause()",
            ["parallel.data=2", "parallel.timeout=10"],
            r"(?s)no process has made progress for \d+ s.*process 1 of 2 .*, cpu\): train, epoch 2, batch 1",
        ),
    ],
    ids=["killed", "hangs"],
)
def test_the_status_says_what_ended_a_job(what, settings, told, start, tmp_path):
    message = run_job(what, start, tmp_path, *settings)
    assert re.search(told, message), message


def test_a_batch_is_compared_with_the_memory_of_all_machines(tmp_path, monkeypatch):
    """A batch that eight machines share was refused, as more than the memory of one."""
    root = make_task(tmp_path / "Task00_Made", num_cases=2)
    config = load_config(write_config(root, tmp_path), ["patch.size=[64,64,64]", "patch.batch=64"])
    task = load_task(root)
    monkeypatch.setattr(placed_network, "list_gpus", list)
    monkeypatch.setattr(placed_network, "total_bytes", lambda: 100 << 20)
    monkeypatch.setattr(placed_network, "count_launched", lambda: 8)
    placed_network.require_room(config, task)
    monkeypatch.setattr(placed_network, "count_launched", lambda: 1)
    with pytest.raises(ConfigError, match=r"times patch\.batch 64 takes .* but there are 0\.1 GiB"):
        placed_network.require_room(config, task)
