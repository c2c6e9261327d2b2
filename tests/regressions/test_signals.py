"""Signals during imports, modules of the working folder, and broken streams damaged a command.

A signal raised an exception during an import: numpy's C code swallowed it, torch ended in a RecursionError, and a
training that continued hung in `torch.save`, which waited for a module's lock.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiment.conftest import write_config
from volseg.checkpointing.components import require_components
from volseg.commands import run_module
from volseg.data.synthetic import make_task
from volseg.errors import ConfigError
from volseg.workflow import load_checkpoint

ENDLESS = ["--set", "training.epochs=100000"]
ESCAPED = "\x1b[2Jliver<img src=x>"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("data") / "Task00_Synthetic", num_cases=3, num_test=0)


def write_cpu_config(task, folder):
    file = write_config(task, folder)
    file.write_text(file.read_text(encoding="utf-8") + "device: cpu\n", encoding="utf-8")
    return file


@pytest.fixture
def config_file(task, tmp_path):
    return write_cpu_config(task, tmp_path)


SENDING = """
import os, sys
name, number = sys.argv.pop(1), int(sys.argv.pop(1))

class Sender:
    def find_spec(self, wanted, path=None, target=None):
        if wanted == name:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Sender())
from volseg.__main__ import main
main()
"""
"""Runs the command, and sends it a signal during an import."""


SAID = "volseg: interrupted; a training that had begun is saved; continue it with --resume"


@pytest.mark.parametrize(
    ("module", "number", "options"),
    [
        ("volseg.cli.options", signal.SIGINT, []),
        ("numpy._core.multiarray", signal.SIGTERM, []),
        ("torch._C", signal.SIGHUP, ["--json-logs"]),
        ("torch.serialization", signal.SIGTERM, []),
    ],
)
def test_a_signal_in_an_import_ends_the_command(start, module, number, options, config_file):
    command = [sys.executable, "-c", SENDING, module, str(int(number)), "train", str(config_file), *options]
    job = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    told, errors = job.communicate(timeout=300)
    assert job.returncode == 128 + number, errors
    assert (json.loads(errors)["message"] if options else errors.removesuffix("\n")) == SAID
    assert told == ""


SENDS = """
import os, signal
from pathlib import Path
os.kill(os.getpid(), signal.SIGTERM)
Path(os.environ["MARKER"]).write_text("went on")
"""


@pytest.mark.usefixtures("ready_python")
def test_a_signal_in_an_import_ends_a_command_that_works_too(start, config_file, tmp_path):
    """A signal left modules half imported that a training imports late."""
    (tmp_path / "late_module.py").write_text(SENDS, encoding="utf-8")
    (tmp_path / "own.py").write_text("import late_module\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    job = start(
        run_module("volseg", "train", str(config_file), "--components", str(tmp_path / "own.py"), *ENDLESS),
        env={**os.environ, "PYTHONPATH": path, "MARKER": str(tmp_path / "marker")},
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 128 + signal.SIGTERM, errors
    assert not (tmp_path / "marker").exists()
    assert errors.splitlines()[-1].startswith("volseg: interrupted;")
    assert "Traceback" not in errors


PLANTED = "import os\nopen(os.environ['MARKER'], 'a').write(__name__ + '\\n')\n"


@pytest.mark.parametrize(
    ("how", "verb"),
    [
        ([str(Path(sys.executable).with_name("volseg"))], ["train", "CONFIG", "--gpus", "2"]),
        ([str(Path(sys.executable).with_name("volseg"))], ["doctor", "--quick"]),
        ([sys.executable, "-m", "volseg"], ["data", "list"]),
    ],
    ids=["train --gpus", "doctor", "python -m"],
)
def test_no_module_of_the_working_folder_is_run(start, how, verb, config_file, tmp_path):
    """`volseg` started processes by ``python -m``, which imported a ``torch.py`` of the working folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    names = ["torch", "numpy", "json", "yaml", "typer", "monai", "pydantic", "socket", "random"]
    names += [] if "-m" in how else ["volseg", "runpy", "signal"]  # `python -m` imports them before volseg runs
    for name in names:
        (folder / f"{name}.py").write_text(PLANTED, encoding="utf-8")
    arguments = [str(config_file) if part == "CONFIG" else part for part in verb]
    arguments += ["--set", "parallel.spatial=2"] if "train" in verb else []
    variables = {**os.environ, "MARKER": str(tmp_path / "marker")}
    job = start([*how, *arguments], cwd=folder, env=variables, stderr=subprocess.PIPE, encoding="utf-8")
    _, errors = job.communicate(timeout=400)
    assert not (tmp_path / "marker").exists(), (tmp_path / "marker").read_text(encoding="utf-8")
    assert job.returncode == 0 or "doctor" in verb, errors
    assert "Traceback" not in errors


def test_every_python_is_started_by_one_function(request):
    """A process that is started otherwise imports from the working folder."""
    root = request.config.rootpath
    files = [file for folder in ("volseg", "workflows") for file in (root / folder).rglob("*.py")]
    others = [file for file in files if 'sys.executable, "-m"' in file.read_text(encoding="utf-8")]
    assert len(files) > 400
    assert others == []


@pytest.mark.parametrize("lost", ["stdout", "stderr", "both"])
@pytest.mark.usefixtures("ready_python")
def test_a_training_finishes_without_a_reader_of_its_output(start, lost, config_file, tmp_path):
    """``volseg train CONFIG | head -1`` finished with status 1."""
    read, write = os.pipe()
    os.close(read)
    kept = subprocess.PIPE
    streams = {"stdout": kept if lost == "stderr" else write, "stderr": kept if lost == "stdout" else write}
    job = start(run_module("volseg", "train", str(config_file)), **streams, encoding="utf-8")
    os.close(write)
    _, errors = job.communicate(timeout=300)
    assert job.returncode == 0, errors
    assert (tmp_path / "run" / "report.md").exists()
    assert [record.epoch for record in load_checkpoint(tmp_path / "run" / "checkpoints" / "latest.pt").history] == [
        0,
        1,
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="asks Linux for a full disk")
@pytest.mark.parametrize(("config", "status"), [("CONFIG", 0), ("missing.yaml", 1)])
@pytest.mark.usefixtures("ready_python")
def test_a_full_disk_under_the_log_does_not_change_the_exit_status(start, config, status, config_file):
    """A finished training ended with status 120, so a loop that restarts failed trainings never ended."""
    config = str(config_file) if config == "CONFIG" else config
    with open("/dev/full", "w", encoding="utf-8") as full:
        job = start(run_module("volseg", "train", config), stdout=subprocess.DEVNULL, stderr=full)
        assert job.wait(300) == status


@pytest.mark.usefixtures("ready_python")
def test_names_reach_the_terminal_and_the_report_as_text(start, tmp_path):
    """Names of labels, cases and files come from outside: an escape sequence in one cleared the screen."""
    task = make_task(tmp_path / "Task\x1b[7m", num_cases=3, num_test=0)
    described = json.loads((task / "dataset.json").read_text(encoding="utf-8"))
    first = next(value for value in described["labels"] if value != "0")
    described["labels"][first] = ESCAPED
    (task / "dataset.json").write_text(json.dumps(described), encoding="utf-8")
    file = write_cpu_config(task, tmp_path)
    for words in (["train", str(file)], ["data", "check", str(task)], ["data", "info", str(task)], ["report", "run"]):
        job = start(run_module("volseg", *words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        told = job.communicate(timeout=300)[0]
        assert job.returncode in (0, 1), told
        assert b"\x1b" not in told
        assert b"Traceback" not in told
        assert (b"\\u001b" in told) >= (words[0] == "train" or words[1] == "info"), words
    report = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert "liver&lt;img src=x>" in report
    assert "<img" not in report
    assert "\x1b" not in report


def test_suggested_commands_hold_no_shell_characters_of_a_foreign_run(tmp_path):
    """The suggested command for a missing component contained shell characters of a foreign run."""
    source = {"file": "$(reboot).py", "sha256": "0" * 64}
    recorded = [{"kind": "network", "name": "Absent", "from": source}]
    (tmp_path / "components.json").write_text(json.dumps(recorded), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape("--components '$(reboot).py' as it was then")):
        require_components(tmp_path, resumes=False)
