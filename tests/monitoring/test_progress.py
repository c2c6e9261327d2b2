"""Bars on streams that cannot be written; the stream is that of a process, so each is one."""

import io
import logging
import os
import subprocess
import sys

import pytest

from volseg.lifetime import say_last
from volseg.monitoring.console import BesideBars, open_bar

BARS = """
import logging, sys
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
open(sys.argv[1], "w").write("done")
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
def test_a_bar_never_ends_a_training(tmp_path, before, stream):
    """The log on a full disk ended one at 16 %, unsaved."""
    command = [sys.executable, "-c", BARS.format(before=before), str(tmp_path / "end")]
    if stream == "gone":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(stream, os.O_WRONLY)
    try:
        done = subprocess.run(command, stderr=writing, stdout=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (tmp_path / "end").read_text() == "done"
    assert done.returncode in (0, 120), done.stdout  # 120: Python could not flush its own standard error


def test_a_bar_is_drawn_on_standard_error(tmp_path):
    command = [sys.executable, "-c", BARS.format(before=""), str(tmp_path / "end")]
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
