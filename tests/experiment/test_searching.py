"""A search: trials are ordinary runs, pruned by their validations, shared by processes, and gone on with."""

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from ready_python import acting_when, wait_until
from training_hooks import press_ctrl_c
from typer.testing import CliRunner

from volseg.cli import app
from volseg.commands import run_module
from volseg.config.loading import read_space
from volseg.errors import ConfigError
from volseg.experiment import RunFolder, load_config, search
from volseg.monitoring.run_files import list_run_folders, read_history
from volseg.reporting import write_report
from volseg.reporting.several_runs import read_search
from volseg.workflow import load_checkpoint

pytestmark = [pytest.mark.usefixtures("ready_python"), pytest.mark.timeout(120)]

SHORT = ("training.epochs=1", "training.iterations=2", "device=cpu")
LONG = ("training.epochs=100000", "training.iterations=1", "training.checkpoint_minutes=0", "device=cpu")
SPACE = "optimizer.lr: {low: 1.0e-3, high: 1.0e-1, log: true}\nschedule.name: [polynomial, cosine]\n"


@pytest.fixture
def over(tmp_path):
    """Return a function that writes the searched ranges."""

    def write(text=SPACE):
        (tmp_path / "search.yaml").write_text(text, encoding="utf-8")
        return tmp_path / "search.yaml"

    return write


def open_study(folder):
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    return optuna.load_study(study_name="search", storage=storage)


def command(config_file, over, settings, *options):
    given = [part for setting in settings for part in ("--set", setting)]
    return run_module("volseg", "search", str(config_file), "--over", str(over), *given, *options)


def test_trials_are_the_runs_that_train_makes(config_file, over, tmp_path, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / "run"
    record = search(config_file, over(), SHORT, trials=2, gpus=2)
    assert [(trial["number"], trial["state"], trial["epochs"]) for trial in record.trials] == [
        (0, "finished", 1),
        (1, "finished", 1),
    ]
    for trial in record.trials:
        run = RunFolder(folder / f"trial_{trial['number']}")
        settings = [f"{key}={value}" for key, value in trial["values"].items()]
        assert run.config() == load_config(config_file, [*SHORT, *settings, f"output={run.path}"]).located()
        assert trial["value"] == read_history(run.path / "history.jsonl")[-1].scalars["val/dice_mean"]
        assert 1e-3 <= trial["values"]["optimizer.lr"] <= 1e-1
    assert record.best["value"] == max(trial["value"] for trial in record.trials)
    assert record.trials[0]["values"] != record.trials[1]["values"]
    assert list_run_folders(folder) == [folder / "trial_0", folder / "trial_1"]

    page = (folder / "search.html").read_text(encoding="utf-8")
    assert page.count("<circle") >= 2
    assert f"volseg predict {folder}/trial_{record.best['number']}" in page.replace(sys.executable, "")
    assert write_report(folder) == folder / "search.html"
    # Asked for as many again, it has nothing to do; asked for more, it goes on.
    assert len(search(config_file, over(), SHORT, trials=2).trials) == 2
    with pytest.raises(ConfigError, match=r"run was started with another config: .*'low': 0\.001.* -> .*'low': 0\.01"):
        search(config_file, over(SPACE.replace("e-3", "e-2")), SHORT, trials=3)
    with pytest.raises(ConfigError, match=r"started with another config: training\.iterations: 2 -> 3"):
        search(config_file, over(), ["training.epochs=1", "training.iterations=3"], trials=3)
    with pytest.raises(ConfigError, match=r"started with another config: metric: dice_mean -> hd95/Anterior"):
        search(config_file, over(), SHORT, trials=3, metric="hd95/Anterior")


def test_a_trial_that_is_worse_than_the_median_is_pruned(config_file, over, tmp_path):
    space, folder = over("optimizer.lr: {low: 1.0e-3, high: 1.0e-1, log: true}"), tmp_path / "run"
    search(config_file, space, LONG, trials=0)
    study = open_study(folder)
    for _ in range(5):  # stand in for trials that went well
        trial = study.ask({"optimizer.lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)})
        trial.report(2.0, 1)
        study.tell(trial, 2.0)
    record = search(config_file, space, LONG, trials=6)
    assert record.best["value"] == 2.0
    (pruned,) = record.trials[5:]
    assert pruned["state"] == "pruned"
    assert 1 <= pruned["epochs"] < 100
    assert load_checkpoint(folder / "trial_5" / "checkpoints" / "latest.pt").progress > (0, 0)


def test_a_search_that_was_killed_goes_on_with_its_trial(config_file, over, tmp_path):
    settings = ("training.epochs=20", *LONG[1:])
    run = tmp_path / "run" / "trial_0"
    process = subprocess.Popen(command(config_file, over(), settings, "--trials", "1"), stdin=subprocess.DEVNULL)
    wait_until((run / "checkpoints" / "latest.pt").exists, 120)
    process.kill()
    process.wait()
    (trial,) = open_study(tmp_path / "run").trials
    assert trial.state.name == "RUNNING"
    record = search(config_file, over(), settings, trials=1)
    assert [(one["state"], one["epochs"]) for one in record.trials] == [("finished", 20)]
    assert "continues after epoch" in (tmp_path / "run" / "trial_0.log").read_text(encoding="utf-8")
    assert len(open_study(tmp_path / "run").trials[0].intermediate_values) == 20


def test_locks_of_a_killed_search_are_links_to_files_as_optuna_then_takes_them_over(
    config_file, over, tmp_path, monkeypatch
):
    """The next search waited for ever, for a link that led nowhere."""
    lock, seen = optuna.storages.journal.JournalFileSymlinkLock, {}
    acquire = lock.acquire

    def look(self):
        acquire(self)
        seen[Path(self._lock_file).name] = Path(self._lock_file).exists()

    monkeypatch.setattr(lock, "acquire", look)
    monkeypatch.chdir(tmp_path)
    search(config_file, over(), ["output=relative"], trials=0)
    assert seen == {"taking.lock": True, "journal.log.lock": True}


def test_ctrl_c_stops_the_trials_and_leaves_them_to_the_next_search(config_file, over, tmp_path):
    checkpoint = tmp_path / "run" / "trial_0" / "checkpoints" / "latest.pt"
    with acting_when(checkpoint.exists, press_ctrl_c), pytest.raises(KeyboardInterrupt):
        search(config_file, over(), LONG, trials=2)
    assert [trial["state"] for trial in read_search(tmp_path / "run").trials] == ["interrupted"]
    assert load_checkpoint(checkpoint).progress > (0, 0)


def test_two_searches_share_the_trials_of_a_folder(config_file, over, tmp_path):
    asked = command(config_file, over(), SHORT, "--trials", "3")
    processes = [subprocess.Popen(asked, stdin=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    trials = open_study(tmp_path / "run").trials
    assert [(trial.number, trial.state.name) for trial in trials] == [(number, "COMPLETE") for number in range(3)]
    assert {trial.user_attrs["owner"]["pid"] for trial in trials} == {process.pid for process in processes}
    assert len({json.dumps(trial.params) for trial in trials}) == 3
    for number in range(3):
        log = (tmp_path / "run" / f"trial_{number}.log").read_text(encoding="utf-8")
        assert log.count("The run is in") == 1  # trained once


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("optimizer.lr: [1.0e+30]\ntraining.clip: [null]\ntraining.iterations: [9]", "loss"),
        # Each value is right by itself.
        ("training.deterministic: [true]\nparallel.on_oom: [replan]", "promises the same bits"),
    ],
)
def test_a_failed_trial_is_told_with_its_error(config_file, over, tmp_path, space, message):
    options = [part for setting in SHORT for part in ("--set", setting)]
    arguments = ["search", str(config_file), "--over", str(over(space)), "--trials", "1", *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 1  # none has finished
    assert [trial["state"] for trial in read_search(tmp_path / "run").trials] == ["failed"]
    assert result.stdout.count("- Trial ") == 1
    assert message in result.stdout


REFUSED = {
    "optimiser.lr: [1, 2]": r"search\.yaml: .* --set optimiser\.lr=1 .*\n.*did you mean 'optimizer'",
    "training.epocs: [1, 2]": r"training\.epocs: unknown key; did you mean 'epochs'",
    "network.channelz: [[4, 8]]": "network UNet has no parameter 'channelz'; did you mean 'channels'",
    "network.name: [UNet, VNett]": "no network is called 'VNett'; did you mean 'VNet'",
    "training.epochs: {low: 0, high: 5}": r"training\.epochs.*greater than or equal to 1, got 0",
    "": "must contain the keys to search over, in lines such as optimizer.lr",
    "seed: 3": "seed needs a range such as .*, or a list of choices; got 3",
    "seed: []": "seed needs a range such as",
    "seed: [1, 1]": "the choices of seed must differ, got 1, 1",
    "output: [a, b]": "output cannot be searched over: each trial has its own folder",
    "seed: {lo: 1, high: 2}": r"seed in .*search.yaml cannot be used:\n .*did you mean 'low'",
    "seed: {low: 3, high: 2}": "low must be below high, got low: 3 and high: 2",
    "seed: {low: 0, high: 2, log: true}": "log: true needs low above 0 and no step, got low: 0",
    "seed: {low: 0.1, high: 0.35, step: 0.1}": "high must be low plus a multiple of step, got low: 0.1",
    "seed: {low: 1, high: true}": "high: needed: a number, got True",
}
"""Spaces, and with which words they are refused."""


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        *((space, {}, message) for space, message in REFUSED.items()),
        (SPACE, {"metric": "dice"}, "validations do not compute the metric 'dice'; did you mean 'dice_mean'"),
        (SPACE, {"metric": "dice/Liver"}, "validations do not compute the metric 'dice/Liver'"),
        (SPACE, {"pruner": "medain"}, "unknown pruner 'medain'; did you mean 'median'"),
        (SPACE, {"overrides": ["training.validate_every=null"]}, "a search compares validations during the training"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_a_training(config_file, over, tmp_path, space, options, message):
    with pytest.raises(ConfigError, match=message):
        search(config_file, over(space), **options)
    assert not (tmp_path / "run").exists()


def test_choices_are_what_set_takes_and_sections_come_first(over):
    space = read_space(
        over("optimizer.lr: {low: 1, high: 2.5, step: 0.5}\noptimizer: [{name: SGD}]\nseed: [1, '1', null, [8]]")
    )
    assert list(space) == ["optimizer", "seed", "optimizer.lr"]
    assert (space["optimizer"], space["seed"]) == (("{name: SGD}",), ("1", "'1'", "null", "[8]"))
    assert not space["optimizer.lr"].is_whole
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file .*; write lines such as"):
        read_space("none.yaml")


def test_without_optuna_the_error_says_what_to_install(config_file, over, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"volseg search needs a package .* pip install optuna$"):
        search(config_file, over())
