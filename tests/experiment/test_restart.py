"""How the processes of a run end, and the run that is started again: by the same command, after whatever ended it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import ready_python
from ready_python import wait_until
from spot_service import serving
from typer.testing import CliRunner

from tests.experiment.conftest import latest, write_config
from volseg import Checkpoints, Hook
from volseg.checkpointing.compatible import load_finished_report
from volseg.checkpointing.job_folder import LOCK
from volseg.cli import app
from volseg.config.loading import format_config, load_config
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.experiment import RunFolder, predict, train, validate
from volseg.experiment.launching import _choose_settings, count_workers
from volseg.launched import OWN_LAUNCHER
from volseg.lifetime import is_running
from volseg.monitoring.spot_notices import ENDPOINT_VARIABLE
from volseg.workflow import load_checkpoint

pytestmark = pytest.mark.usefixtures("ready_python")


class Fails(Hook):
    def __init__(self, epoch, position):
        self.at = (epoch, position)

    def on_batch_end(self, training, fields):
        next(hook for hook in training.hooks if isinstance(hook, Checkpoints)).finish()  # the next one can be taken
        if (training.epoch, training.position) == self.at:
            raise InterruptedError


def damage(path):
    """Flip a bit in each of 400 bytes: fewer could all fall between two parts, where nothing is stored."""
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 400):
        content[place] ^= 1
    path.unlink()  # another name of the file stays as it is
    path.write_bytes(content)


def finished_report(config):
    return load_finished_report(RunFolder(config.folder), config)


def run(config_file, *more):
    return CliRunner().invoke(app, ["train", str(config_file), *more], catch_exceptions=False)


@pytest.fixture(scope="module")
def lost(task, tmp_path_factory):
    """Return the folder of a run that was lost in its second epoch, with three checkpoints."""
    config = load_config(write_config(task, tmp_path_factory.mktemp("lost")), ["training.checkpoint_minutes=0"])
    with pytest.raises(InterruptedError):
        train(config, hooks=[Fails(1, 2)])
    assert {path.name for path in (config.folder / "checkpoints").iterdir()} == {"latest.pt", "previous.pt", "best.pt"}
    return config.folder


@pytest.fixture
def half(lost, configured):
    """Return a copy of the lost run at the output of the config."""
    return RunFolder(shutil.copytree(lost, configured().folder))


def test_restart_begins_goes_on_and_then_prints_the_report(config_file, configured):
    folder = RunFolder(configured().folder)
    folder.path.mkdir()
    # A run was killed while it was described.
    for name in ("environment.json", "task.json", "split.json", ".config.yaml.1a2b3c4.partial", LOCK):
        (folder.path / name).write_text("{}", encoding="utf-8")
    assert run(config_file, "--restart", "--set", "training.epochs=1").exit_code == 0
    assert not list(folder.path.glob(".*.partial"))
    assert len(latest(folder.path).history) == 1
    assert run(config_file, "--restart").exit_code == 0  # longer: there is something left to train
    assert len(latest(folder.path).history) == 2
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    third = run(config_file, "--restart")
    assert third.exit_code == 0
    assert third.output.strip() == folder.report_file.read_text(encoding="utf-8").strip()
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before
    with pytest.raises(ConfigError, match=r"started with another config: optimizer\.lr"):
        run(config_file, "--restart", "--set", "optimizer.lr=0.5")


def test_a_report_of_fewer_epochs_is_not_one_of_the_run(trained, configured):
    """A kill between the longer config and the removal of the report made it look so."""
    shutil.copytree(trained.folder.path, configured().folder)
    longer = configured("training.epochs=3")
    assert finished_report(configured()) is not None
    assert finished_report(longer) is None
    with pytest.raises(InterruptedError):
        train(longer, resume=True, hooks=[Fails(2, 1)])
    assert finished_report(longer) is None


def test_what_a_killed_process_was_writing_is_removed_when_the_folder_is_locked(configured, half):
    """Each was as large as a checkpoint and stayed for ever."""
    left = [half.checkpoints / ".latest.pt.0004321.partial", half.path / ".report.md.0004321.partial"]
    kept = half.checkpoints / ".somebody's"
    for path in (*left, kept):
        path.write_bytes(b"half")
    train(configured(), resume=True)
    assert not any(path.exists() for path in left)
    assert kept.exists()


def test_damaged_checkpoints_are_passed_over_and_named(trained, configured, half, caplog):
    """One flipped bit of ``latest.pt`` was silently loaded."""
    names = ("latest.pt", "previous.pt", "best.pt")
    newest, previous, best = (load_checkpoint(half.checkpoints / name).progress for name in names)
    assert previous < newest
    expected = max(previous, best)
    damage(half.checkpoints / "latest.pt")
    with caplog.at_level("WARNING"):
        resumed = train(configured(), resume=True)
    assert "latest.pt is damaged" in caplog.text
    assert f"after epoch {expected[0]} and batch {expected[1]}" in caplog.text
    assert [record.losses for record in resumed.history] == [record.losses for record in trained.history]


def test_without_a_sound_checkpoint_nothing_begins_by_itself(configured, half):
    for path in half.checkpoints.iterdir():
        damage(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint to continue from: .*latest\.pt is damaged.*best.*prev"):
        train(configured(), resume=True)
    assert len(list(half.checkpoints.iterdir())) == 3


def test_other_weights_than_those_asked_for_are_named_and_never_taken(configured, half, task):
    damage(half.checkpoints / "latest.pt")
    names = r"latest\.pt is damaged.*Another checkpoint exists: --checkpoint best or previous"
    for use in (lambda: predict(half, [task / "imagesTs"]), lambda: validate(half)):
        with pytest.raises(CheckpointError, match=names):
            use()
    assert not half.predictions.exists()
    assert validate(half, checkpoint="previous").score >= 0
    assert (half.path / "validation_previous" / "summary.json").exists()


class Windows(Hook):
    """Send SIGTERM in the second window of the second validation, and count the windows."""

    def __init__(self):
        self.seen = 0

    def on_training_begin(self, training):
        def predicted(network, volumes, logits):
            self.seen += not network.training
            if training.epoch == 1 and not network.training and not self.sent:
                self.sent = self.seen
                os.kill(os.getpid(), signal.SIGTERM)

        self.sent = 0
        training.network.register_forward_hook(predicted)


def test_sigterm_is_heeded_between_the_windows_of_one_volume(configured):
    """It was checked only between cases, and a case may take minutes."""
    hook = Windows()
    config = configured("inference.window=[16, 16, 16]")
    with pytest.raises(SystemExit) as ended:
        train(config, hooks=[hook])
    assert ended.value.code == 143
    assert hook.seen == hook.sent
    assert latest(config.folder).progress == (1, 3)


ENDLESS = ["--set", "training.iterations=100000"]


@pytest.fixture
def train_endlessly(start, config_file):
    """Return a function that starts a training, with more arguments and variables."""

    def started(*more, **environment):
        command = [sys.executable, "-m", "volseg", "train", str(config_file), *ENDLESS, *more]
        streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "encoding": "utf-8"}
        return start(command, env={**os.environ, **environment}, **streams)

    return started


def wait_for(file, process):
    wait_until(lambda: file.exists() or process.poll() is not None, 120)


@pytest.mark.parametrize(
    ("number", "status", "seen"),
    [
        (signal.SIGTERM, 143, "checkpoints/latest.pt"),
        (signal.SIGTERM, 143, LOCK),  # as early as it may come
        (signal.SIGHUP, 129, "checkpoints/latest.pt"),
        (signal.SIGINT, 130, "checkpoints/latest.pt"),
    ],
)
def test_each_signal_saves_and_ends_within_seconds_with_its_status(train_endlessly, configured, number, status, seen):
    """SIGHUP, of an ssh connection that drops, ended a training unsaved."""
    folder = configured().folder
    process = train_endlessly("--set", "training.checkpoint_minutes=0")
    wait_for(folder / seen, process)
    process.send_signal(number)
    sent = time.monotonic()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == status, said
    assert time.monotonic() - sent < 20  # the promise; it takes milliseconds on an idle machine
    assert "continue it with --resume" in said
    assert "Traceback" not in said
    assert not (folder / LOCK).exists()
    assert seen == LOCK or load_checkpoint(folder / seen).position > 0


def test_a_spot_notice_saves_and_ends_with_the_status_of_sigterm(train_endlessly, configured):
    folder = configured().folder
    settings = ["--set", "training.spot=aws", "--set", "training.checkpoint_minutes=0"]
    with serving() as service:
        process = train_endlessly(*settings, **{ENDPOINT_VARIABLE: service.endpoint})
        wait_for(folder / "checkpoints" / "latest.pt", process)
        service.notice = json.dumps({"action": "stop", "time": "soon"})
        sent = time.monotonic()
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 143, said
    assert time.monotonic() - sent < 25  # 5 s until it is asked, and the 20 s of any signal
    assert "the provider will reclaim this machine (stop at soon): saving the training and stopping" in said
    assert latest(folder).position > 0


@pytest.mark.parametrize(
    ("begun", "asked", "gpus"),
    [
        (["data=2"], 2, 2),
        (["spatial=2", "checkpoint=all"], 2, 2),
        (["pipeline=2", "split_size=1"], 2, 2),
        # Fewer than it was asked for: the run folder did not say of how many GPUs it had chosen some.
        (["data=2", "chosen_for=4"], 4, 2),
        (["strategy=spatial", "devices=1", "checkpoint=1", "chosen_for=4"], 4, 1),
        (["chosen_for=4"], 4, 1),
    ],
)
def test_auto_goes_on_as_the_run_was_begun_where_it_has_as_many_gpus(configured, config_file, begun, asked, gpus):
    """A new choice changed the order of sums; run and config values must not mix."""
    first = configured(*[f"parallel.{value}" for value in begun])
    first.folder.mkdir()
    (first.folder / "config.yaml").write_text(format_config(first), encoding="utf-8")
    auto = ["parallel.strategy=auto", "parallel.timeout=100", "device=cpu"]
    settings, count = _choose_settings(configured(*auto), asked, resume=True)
    assert count == gpus
    again = load_config(config_file, [*auto, *settings])
    assert again.parallel == first.parallel.model_copy(update={"timeout": 100.0})
    assert count_workers(again, count) == gpus // (first.parallel.pipeline or 1)
    assert _choose_settings(configured(*auto), 3, resume=True) == ([], 3), "on others it chooses anew"
    assert _choose_settings(configured(*auto), asked, resume=False) == ([], asked)


DAMAGED = {
    "empty": b"",
    "cut": b'{"name": "Ta',
    "no text": b"\xff\xfe\x00\x00",
    "a list": b"[]",
    "null": b"null",
    "nothing in it": b"{}",
    "labels are none": b'{"name": "a", "modalities": ["MRI"], "labels": null}',
    "labels are a list": b'{"name": "a", "modalities": ["MRI"], "labels": [1, 2]}',
    "a label is not a number": b'{"name": "a", "modalities": ["MRI"], "labels": {"0": "b", "x": "c"}}',
    "a label is not a name": b'{"name": "a", "modalities": ["MRI"], "labels": {"0": "b", "1": null}}',
    "no modality": b'{"name": "a", "modalities": [], "labels": {"0": "b", "1": "c"}}',
    "nested": b"[" * 100_000,
}


def test_a_damaged_task_or_split_is_named_by_every_verb(task, own_run, configured):
    longer = ["training.epochs=2", "training.iterations=1", "device=cpu", f"output={own_run.path}"]
    again = partial(validate, own_run, overwrite=True)
    verbs = {
        "task.json": [partial(predict, own_run, [task / "imagesTs"]), again],
        "split.json": [partial(train, configured(*longer), resume=True), again],
    }
    for name, calls in verbs.items():
        file = own_run.path / name
        sound = file.read_bytes()
        for content in (*DAMAGED.values(), None):
            file.unlink() if content is None else file.write_bytes(content)
            for call in calls:
                with pytest.raises(DataError, match=name):
                    call()
        file.write_bytes(sound)
    assert again().score >= 0


TOLD = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}


def volseg(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "volseg", *arguments]


def children(process: subprocess.Popen) -> list[int]:
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    names = {pid: Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() for pid in pids}
    return [int(pid) for pid, name in names.items() if name != ready_python.NAME]  # which is one of the tests' own


def test_a_killed_process_is_started_again_and_the_job_goes_on(start, config_file, tmp_path):
    mesh = ["--set", "device=cpu", "--set", "parallel.spatial=2"]
    mesh += ["--set", "training.epochs=8", "--set", "training.checkpoint_minutes=0.001"]
    job = start(volseg("train", str(config_file), *mesh, "--gpus", "2", "--max-restarts", "1"), **TOLD)
    wait_until(lambda: (tmp_path / "run" / "checkpoints" / "latest.pt").exists(), 120)
    killed = children(job)[-1]
    os.kill(killed, signal.SIGKILL)
    told, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert "| mean " in told
    history = latest(tmp_path / "run").history
    assert [record.epoch for record in history] == list(range(8))


KILLED = """
import os, signal
import volseg
from volseg.parallel.devices import count_restarts

@volseg.register("hook", "Killed")
class Killed(volseg.Hook):
    def on_batch_end(self, training, fields):
        if training.epoch == 1 and count_restarts() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_single_process_is_started_again_too(start, config_file, tmp_path):
    """The option was passed over where there was one process."""
    (tmp_path / "killed.py").write_text(KILLED, encoding="utf-8")
    settings = ["--set", "hooks=[{name: Killed}]", "--set", "training.checkpoint_minutes=0.0001"]
    command = volseg("train", str(config_file), *settings, "--components", str(tmp_path / "killed.py"))
    job = start([*command, "--max-restarts", "1"], **TOLD)
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert "was killed by SIGKILL" in errors
    assert "restarting all processes (restart 1 of 1)" in errors
    history = latest(tmp_path / "run").history
    assert [record.epoch for record in history] == [0, 1]


def test_an_error_is_told_once_and_without_gloo(start, config_file):
    settings = ["--set", "device=cpu", "--set", "parallel.spatial=2", "--set", "optimizer.lr=1e30"]
    job = start(volseg("train", str(config_file), "--gpus", "2", *settings), **TOLD)
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 1
    assert "Traceback" not in errors
    assert "gloo" not in errors
    last = errors.rstrip().splitlines()[-1]
    assert re.match(r"volseg: process [01] of 2 \(\S+, cpu\): the loss is not finite in epoch 1", last), last
    assert errors.count("the loss is not finite") <= 2  # by the other process, in a line, if it lives to say so


VERB = """
import os, sys
from volseg.cli import main
sys.argv[1:] = ["predict-cases"]
print(os.getpid(), flush=True)
main()
"""

STARTER = f"import os, subprocess, sys; os.environ[{OWN_LAUNCHER!r}] = str(os.getpid()); subprocess.run(sys.argv[1:])"


def test_no_fold_outlives_a_killed_cross_validation(start):
    """Folds are volseg commands; this one waits for an order that never comes."""
    job = start(
        [sys.executable, "-c", STARTER, sys.executable, "-c", VERB], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    verb = int(job.stdout.readline())
    job.kill()
    job.wait()
    wait_until(lambda: not is_running(verb), 30)


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core follows in the process itself")
def test_a_plan_that_is_interrupted_leaves_no_copies(start, request):
    vnet = request.config.rootpath / "configs" / "task04_vnet.yaml"
    # Many ways to look at, so that it is still at it when it hears of Ctrl-C, which a terminal sends to all.
    job = start(volseg("plan", str(vnet), "--instance", "p3.16xlarge", "--max-volume"), **TOLD, start_new_session=True)
    try:
        # Two, as one may be the tests' own, which has another name at first.
        wait_until(lambda: job.poll() is not None or len(children(job)) > 1, 120)
        copies = children(job)
        os.killpg(job.pid, signal.SIGINT)
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 130, errors
    assert errors.splitlines()[-1] == "volseg: interrupted; run the same command again"
    assert copies
    wait_until(lambda: not any(map(is_running, copies)), 30)
