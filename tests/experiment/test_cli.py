import json
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from ready_python import wait_until
from torch import nn
from typer.testing import CliRunner

from volseg.cli import app, main
from volseg.errors import ConfigError, DataError, VolsegError
from volseg.experiment import quickstart
from volseg.models.networks import NETWORKS

pytestmark = pytest.mark.usefixtures("ready_python")

VERBS = [
    *("configure", "train", "cross-validate", "validate", "predict", "evaluate", "compare", "verify", "quickstart"),
    *("data list", "data info", "data fetch", "data make", "data check"),
    *("data cache list", "data cache clear", "data cache verify"),
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb):
    result = CliRunner().invoke(app, [*verb.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Example: volseg {verb}" in result.output
    assert "<bool>" not in result.output  # a flag takes no value


def test_a_fault_is_one_message_without_traceback(config_file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["volseg", "train", str(config_file), "--set", "trainin.epochs=1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "trainin: unknown key; did you mean 'training'?" in said
    assert "Traceback" not in said


def test_data_make_writes_a_task(tmp_path):
    result = CliRunner().invoke(app, ["data", "make", str(tmp_path / "Task00_Made"), "--cases", "2", "--tests", "0"])
    assert result.exit_code == 0
    assert len(list((tmp_path / "Task00_Made" / "imagesTr").iterdir())) == 2


def test_data_check_names_all_bad_cases(task, tmp_path):
    result = CliRunner().invoke(app, ["data", "check", str(task)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "all 7 cases of Task00_Synthetic can be used" in result.output
    damaged = shutil.copytree(task, tmp_path / task.name)
    for file in (damaged / "imagesTr" / "synthetic_002.nii.gz", damaged / "imagesTs" / "synthetic_007.nii.gz"):
        file.write_bytes(file.read_bytes()[:2000])
    found = CliRunner().invoke(app, ["data", "check", str(damaged)], catch_exceptions=False)
    assert found.exit_code == 1
    first, *_ = found.output[found.output.index("bad ") :].splitlines()
    assert first.split()[:4] == ["bad", "2", "cases", "truncated"]
    assert first.endswith("synthetic_002, synthetic_007")
    assert "2 of 7 cases of Task00_Synthetic cannot be used" in found.output


def test_data_check_counts_remarks_when_strict_and_writes_json_and_a_corrected_copy(task, tmp_path):
    told, repaired = tmp_path / "check.json", tmp_path / "repaired"
    command = ["data", "check", str(task), "-o", str(told), "--fix", str(repaired)]
    found = CliRunner().invoke(app, command, catch_exceptions=False)
    assert found.exit_code == 0
    assert json.loads(told.read_text(encoding="utf-8"))["findings"][0]["kind"] == "orientation"
    assert f"{repaired} is the corrected copy: 0 case(s) repaired, 0 left out" in found.output
    assert CliRunner().invoke(app, ["data", "check", str(repaired), "--strict"]).exit_code == 1
    written = CliRunner().invoke(app, command).exception
    assert isinstance(written, ConfigError)
    assert "check.json exists; choose" in str(written)
    refused = CliRunner().invoke(app, [*command, "--overwrite"]).exception
    assert isinstance(refused, DataError)
    assert "exists and is not an empty folder" in str(refused)
    printed = CliRunner().invoke(app, ["data", "check", str(task), "--json"])
    assert json.loads(printed.stdout) == json.loads(told.read_text(encoding="utf-8"))


def test_verify_prints_a_table_or_json(config_file):
    result = CliRunner().invoke(app, ["verify", str(config_file), "--devices", "2"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "2 shards and one device are equal to round-off" in result.output
    command = ["verify", str(config_file), "--devices", "2", "--strategy", "pipeline", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["strategy"], told["verdict"], told["shards"]) == ("pipeline", "equal", 2)


def test_verify_takes_another_network_by_name(config_file, monkeypatch):
    class Scaled(nn.Conv3d):
        """A network of the user's own that two devices cannot compute alike: it draws for itself."""

        def __init__(self, in_channels, out_channels, factor=1.0):
            super().__init__(in_channels, out_channels, 3, padding=1)
            self.factor = factor

        def forward(self, x):
            return super().forward(x) * (self.factor + torch.rand(()))

    monkeypatch.setitem(NETWORKS._components, "Scaled", Scaled)  # for one test; a name cannot be taken back
    command = ["verify", str(config_file), "--network", "Scaled", "--set", "network.factor=2", "--devices", "2"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 1
    assert "NOT COMPARED" in result.output
    with pytest.raises(ConfigError, match="no network is called 'Scald'"):
        CliRunner().invoke(app, ["verify", str(config_file), "--network", "Scald"], catch_exceptions=False)


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output.startswith("volseg ")


def test_an_output_folder_is_a_path_whatever_its_name_means_in_yaml(config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", str(config_file), "--set", "training.epochs=1", "-o", "2024-05-01"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "2024-05-01" / "report.md").exists()


def test_ctrl_c_of_several_processes_says_how_to_go_on(start, config_file, tmp_path):
    command = [sys.executable, "-m", "volseg", "train", str(config_file), "--gpus", "2", "--set", "device=cpu"]
    command += ["--set", "training.iterations=5000", "--set", "logging.loggers=[tensorboard]"]
    running = start(command, stderr=subprocess.PIPE, encoding="utf-8")
    logs = tmp_path / "run" / "tensorboard"
    wait_until(lambda: any(logs.glob("*")) or running.poll() is not None, 120)
    running.send_signal(signal.SIGINT)
    said = running.communicate()[1]
    assert running.returncode == 130
    assert "interrupted; a training that had begun is saved; continue it with --resume" in said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "checkpoints" / "latest.pt").exists()


def test_what_the_system_refuses_is_one_message_too(config_file, monkeypatch, capsys):
    """A limit on file sizes simulates a full disk."""
    monkeypatch.setattr(sys, "argv", ["volseg", "train", str(config_file)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.value.code == 1
    assert "File too large; free space, or name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "RUN"], "RUN is a run folder, .*; continue the run with .* train RUN/config.yaml -o RUN --resume"),
        (["train", "IMAGE"], "IMAGE is not text in UTF-8 .* or the folder of a data set"),
        (["train", "CONFIG", "--set", "network.channels=8"], "network UNet refused {'channels': 8, "),
        (["train", "CONFIG", "--gpus", "99"], "--gpus 99 needs "),
        (["predict", "CONFIG", "IMAGE"], "CONFIG is not a model; name a run folder of volseg train"),
        (["predict", "TASK", "IMAGE"], "TASK is not a model; name a run folder"),
        (["predict", "nowhere", "IMAGE"], "nowhere does not exist; name a run folder"),
        (["validate", "CONFIG"], "CONFIG is neither a run folder nor a cross-validation"),
        (["evaluate", "--predictions", "nowhere", "--labels", "TASK/labelsTr"], "nowhere does not exist; name a"),
        (["configure", "TASK", "-o", "new.yaml", "--preset", "unett"], "no preset is called 'unett'; did you mean"),
        (["configure", "TASK", "-o", "new.yaml", "--gpu-memory", "many"], "must be a size such as 16GiB, got 'many'"),
        (["data", "fetch", "Task99"], "no public task is called 'Task99'; known: Task01_BrainTumour"),
        (["data", "check", "nowhere"], "nowhere does not exist; name the TaskNN_Name folder"),
        (["compare", "TASK"], "TASK has no summary.json .*; name a run"),
        (["postprocess", "TASK"], "TASK is neither a run folder nor a cross-validation"),
        (["components", "nets"], "unknown kind of component 'nets'; known: augmentation, hook"),
        (["train", "CONFIG", "--components", "nowhere.py"], "--components nowhere.py cannot be read: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_given_in_the_place_of_another_is_told(command, message, config_file, task, tmp_path, monkeypatch):
    """A run for a config, a config for a run, an image for a data set: the error says what to type."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.yaml").write_text(config_file.read_text(encoding="utf-8"), encoding="utf-8")
    image = next(iter(sorted((task / "imagesTr").iterdir())))
    named = {"RUN": "trained", "CONFIG": str(config_file), "TASK": str(task), "IMAGE": str(image)}

    def name(text):
        for word, path in named.items():
            text = text.replace(word, path)
        return text

    raised = CliRunner().invoke(app, list(map(name, command))).exception
    assert isinstance(raised, VolsegError), raised
    pattern = ".*".join(map(re.escape, name(message).split(".*")))
    assert re.search(pattern, str(raised)), raised


def test_the_quickstart_says_first_where_it_lies_and_how_to_go_on(tmp_path, caplog):
    """When stopped, it printed ``RUN`` without the folder's name."""
    caplog.set_level("INFO")
    run = tmp_path / "a run"
    with pytest.raises(ConfigError, match="epochs"):
        quickstart(run, ["training.epochs=0"])
    told = caplog.messages[0]
    assert f"data and run are in {run};" in told
    words = shlex.split(told.partition("continue it with: ")[2])
    assert words[-5:] == ["train", str(run / "config.yaml"), "-o", str(run), "--resume"]
