"""Bars on streams that cannot be written; the stream is that of a process, so each is one."""

import errno
import io
import logging
import os
import subprocess
import sys

import pytest

from volseg.lifetime import say_last
from volseg.monitoring.console import BesideBars, open_bar

BARS = """
import logging, sys, traceback
sys.excepthook = lambda *fault: print(*traceback.format_exception(*fault), flush=True)
{before}
logging.basicConfig(level=logging.INFO)
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
@pytest.mark.usefixtures("ready_python")
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


def test_a_bar_is_drawn_on_standard_error():
    command = [sys.executable, "-c", BARS.format(before="")]
    said = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stderr
    assert "training: 100%" in said
    assert "6/6" in said
    assert "three: 100%" in said


def test_a_line_of_the_log_stands_by_itself_beside_an_open_bar(monkeypatch):
    """It stood behind the bar: tqdm clears those that share the line's stream, and took ours for another one."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    handler = BesideBars()
    with open_bar(total=3, desc="counted"):
        handler.emit(logging.makeLogRecord({"msg": "a line"}))
        assert shown.getvalue().split("\n")[0].rpartition("\r")[2] == "a line"
        say_last("the last words")
    assert "\nthe last words\n" in shown.getvalue()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_bar_is_opened_beside_a_stream_that_cannot_be_flushed(monkeypatch, name):
    """tqdm flushed both when it took the bar's stream for standard error, which a full disk refuses."""

    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, name, Full())
    with open_bar(total=3, desc="counted") as bar:
        bar.update()
    assert bar.n == 1


def test_a_line_of_the_log_on_a_closed_stream_ends_nothing(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with open_bar(total=3, desc="counted") as bar:
        BesideBars().emit(logging.makeLogRecord({"msg": "a line"}))
        bar.update()
    assert bar.n == 1


@pytest.mark.parametrize("before", ["", "sys.stderr = None", "sys.stderr.close()"], ids=["full", "none", "closed"])
def test_last_words_that_nobody_can_hear_change_no_exit_status(before):
    """The status was that of the error which writing them raised."""
    code = f"import sys; {before}\nfrom volseg.lifetime import end_now, say_last\nsay_last('words'); end_now(7)"
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full, check=False).returncode == 7
