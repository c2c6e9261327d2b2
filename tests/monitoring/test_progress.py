"""Progress bars on streams that cannot be written; each test has a process, because the stream belongs to it."""

import errno
import fcntl
import io
import json
import logging
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from volseg.lifetime import say_last
from volseg.monitoring.console import Bar, BesideBars

pytestmark = pytest.mark.usefixtures("ready_python")

BARS = """
import logging, sys, traceback
sys.excepthook = lambda *fault: print(*traceback.format_exception(*fault), flush=True)
{before}
from volseg.monitoring.console import set_up_logs
set_up_logs()
import torch
from volseg import Named, Training
from volseg.monitoring.progress import Progress, count_up, progress
net = torch.nn.Conv3d(1, 2, 1)
batches = [{{"image": torch.ones(1, 1, 2, 2, 2), "label": torch.zeros(1, 2, 2, 2).long()}}] * 3
training = Training(
    Named(net, ["image"], ["logits"]),
    Named(torch.nn.functional.cross_entropy, ["logits", "label"], ["loss"]),
    torch.optim.SGD(net.parameters(), lr=0.1), batches, epochs=2, hooks=[Progress()])
training.run()
assert len(list(progress(range(3), "three"))) == 3
with count_up(3, "counted") as count:
    count()
print("done")
"""


@pytest.mark.parametrize(
    ("before", "stream"),
    [
        ("", "/dev/full"),
        ("sys.stderr.close()", os.devnull),
        ("import os; os.close(2)", os.devnull),
        ("sys.stderr = None", os.devnull),
        ("", "gone"),
    ],
    ids=["full", "closed", "closed descriptor", "none", "nobody reads"],
)
def test_a_bar_never_ends_a_training(before, stream):
    """The log on a full disk ended one at 16 %, unsaved."""
    command = [sys.executable, "-c", BARS.format(before=before)]
    # A stream with a buffer, as it is for most, keeps what it could not write, and fails at every flush from then on.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if stream == "gone":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(stream, os.O_WRONLY)
    try:
        done = subprocess.run(
            command, stderr=writing, stdout=subprocess.PIPE, encoding="utf-8", env=environment, check=False
        )
    finally:
        os.close(writing)
    assert done.stdout == "done\n"
    assert done.returncode in (0, 120)  # 120: Python could not flush its own standard error


def read_log(logs="", more=""):
    """Return the lines of a program whose output is not a terminal."""
    before = f"import os; os.environ['VOLSEG_LOGS'] = {logs!r}" if logs else ""
    command = [sys.executable, "-c", BARS.format(before=before) + more]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stderr.splitlines()


def run_bars(tmp_path, **variables):
    """Return the lines that a program leaves on a terminal of 200 columns."""
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    program = tmp_path / "bars.py"
    program.write_text(BARS.format(before=""), encoding="utf-8")
    environment = {**os.environ, "TERM": "xterm", **variables}
    with subprocess.Popen(
        [sys.executable, program], stderr=writing, stdout=subprocess.PIPE, env=environment
    ) as running:
        os.close(writing)
        said = b""
        with suppress(OSError):  # the other end is closed
            while piece := os.read(reading, 65536):
                said += piece
        os.close(reading)
        assert running.wait() == 0
    return said.decode("utf-8").replace("\r\n", "\n")


def test_bars_are_drawn_on_a_terminal_and_stay_there(tmp_path):
    said = run_bars(tmp_path)
    assert re.search(r"epoch 2/2 .* 3/3 batch .*loss \d\.\d{3}", said)
    assert re.search(r"three .* 3 case", said)
    assert "epoch 1/2: loss" not in said  # a line for each epoch is for logs
    assert "\x1b[?25l" not in said  # a cursor that is hidden stays so when the process is killed


def test_a_log_gets_a_line_for_each_epoch_as_text_or_json_or_warnings_only():
    said = read_log()
    assert [line.partition(":")[0] for line in said] == ["epoch 1/2", "epoch 2/2"]
    assert re.match(r"epoch 1/2: loss \d\.\d{4}, .* s \(.* s waiting\)", said[0])
    told = [json.loads(line) for line in read_log("json")]
    assert [line["epoch"] for line in told] == [1, 2]
    assert told[0]["scalars"]["train/loss"] > told[1]["scalars"]["train/loss"]
    assert told[0]["message"].startswith("epoch 1/2: loss")
    assert read_log("quiet", "logging.info('not this'); logging.warning('this')") == ["this"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_of_the_log_stands_by_itself_above_an_open_bar(monkeypatch):
    """It was printed after the bar, on the same line."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    handler = BesideBars()
    with Bar("counted", 3):
        handler.emit(logging.makeLogRecord({"msg": "a line"}))
        assert "\r\x1b[2Ka line\ncounted" in shown.getvalue()  # the bar's line is cleared, and drawn anew below
        say_last("the last words")
    assert "\nthe last words\n" in shown.getvalue()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_bar_is_opened_beside_a_stream_that_cannot_be_flushed(monkeypatch, name):
    """Both were flushed when the bar's stream was taken for standard error, which a full disk refuses."""

    class Full(Terminal):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, name, Full())
    with Bar("counted", 3) as bar:
        bar.advance()
    assert bar.done == 1


@pytest.mark.parametrize("before", ["", "sys.stderr = None", "sys.stderr.close()"], ids=["full", "none", "closed"])
def test_last_words_that_nobody_can_hear_change_no_exit_status(before):
    """The error of writing them replaced the exit status."""
    code = f"import sys; {before}\nfrom volseg.lifetime import end_now, say_last\nsay_last('words'); end_now(7)"
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full, check=False).returncode == 7


JSON, BOTH, TURNED = ["--json-logs"], ["--json-logs", "--quiet"], ["--quiet", "--json-logs"]
WRONG = {
    "no such verb": ([*JSON, "trian"], 2, "No such command 'trian'"),
    "no such option": ([*BOTH, "status", "nowhere", "--maxage", "1m"], 2, "No such option: --maxage"),
    "nothing behind the verb": ([*TURNED, "report"], 2, "Missing argument"),
    "a wrong value": ([*JSON, "status", "nowhere", "--max-age", "soon"], 2, "such as 10m"),
    "a folder that is not a run": ([*BOTH, "report", "nowhere"], 1, "nowhere does not exist"),
    "what the system refuses": ([*TURNED, "report", "RUN", "-o", "/dev/full/page.html"], 1, "/dev/full"),
}


@pytest.mark.parametrize(("arguments", "status", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_goes_wrong_is_one_line_of_json_too(tmp_path, arguments, status, words):
    (tmp_path / "config.yaml").write_text("name: a\n", encoding="utf-8")
    placed = [str(tmp_path) if argument == "RUN" else argument for argument in arguments]
    command = [sys.executable, "-m", "volseg", *placed]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == status
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in told] == ["ERROR"]
    assert words in told[0]["message"]


@pytest.mark.parametrize("logs", ["json", "quiet,json"])
def test_a_fault_that_nobody_expected_is_one_line_of_json_with_its_traceback(logs):
    code = "from volseg.monitoring.console import set_up_logs; set_up_logs(); import logging; logging.info('a'); 1 / 0"
    told = {**os.environ, "VOLSEG_LOGS": logs}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=told, check=False)
    assert done.returncode == 1
    *before, last = (json.loads(line) for line in done.stderr.splitlines())
    assert [line["message"] for line in before] == ([] if "quiet" in logs else ["a"])
    assert last["message"] == "ZeroDivisionError: division by zero"
    assert "<module>" in last["traceback"]
