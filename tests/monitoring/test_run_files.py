"""The files with a training's progress, which others may read at any moment."""

import json
import math

import pytest

from volseg.errors import DataError
from volseg.monitoring.run_files import (
    EpochLine,
    RunPart,
    RunStatus,
    append_history,
    begin_history,
    read_history,
    read_status,
    read_times,
    write_status,
    write_times,
)


def line(epoch, **scalars):
    return EpochLine(epoch=epoch, step=10 * epoch, time=1.5, scalars={"train/loss": 0.5, **scalars})


def test_a_history_is_read_as_it_was_written_nan_too(tmp_path):
    file = tmp_path / "history.jsonl"
    assert read_history(file) == []
    append_history(file, line(1))
    append_history(file, line(2, dice=math.nan))
    first, second = read_history(file)
    assert first == line(1)
    assert second.step == 20
    assert math.isnan(second.scalars["dice"])
    for text in file.read_text(encoding="utf-8").splitlines():
        json.loads(text, parse_constant=pytest.fail)  # other languages' readers know no NaN


@pytest.mark.parametrize("torn", ['{"epoch": 2, "st', "\x00\x00\x00", '{"epoch": 2, "step": 3}\n', "\x00\x00\n"])
def test_a_line_that_a_crash_cut_off_is_dropped_and_the_next_one_stands_by_itself(tmp_path, torn):
    file = tmp_path / "history.jsonl"
    append_history(file, line(1))
    append_history(file, line(2))
    with file.open("a", encoding="utf-8") as history:
        history.write(torn)
    assert read_history(file) == [line(1), line(2)]
    begin_history(file, 2)
    append_history(file, line(3))
    assert read_history(file) == [line(1), line(2), line(3)]


def test_lines_past_the_epoch_gone_on_from_are_dropped(tmp_path):
    file = tmp_path / "history.jsonl"
    for epoch in range(1, 5):
        append_history(file, line(epoch))
    begin_history(file, 2)
    assert [found.epoch for found in read_history(file)] == [1, 2]
    begin_history(file, 0)
    assert not file.exists()


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    file = tmp_path / "history.jsonl"
    file.write_text('{"epoch": 0}\n{"epoch": 1, "step": 1, "time": 1, "scalars": {}}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"history.jsonl, line 1, is not a line of a history"):
        read_history(file)


def test_a_status_is_read_as_it_was_written_and_keys_of_a_later_version_are_passed_over(tmp_path):
    file = tmp_path / "status.json"
    assert read_status(file) is None
    status = RunStatus(state="training", time=2.0, started=1.0, host="here", pid=7, epoch=1, loss=math.nan)
    write_status(file, status)
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["loss"] is None  # NaN is not JSON
    file.write_text(json.dumps({**written, "of_a_later_version": 1}), encoding="utf-8")
    found = read_status(file)
    assert (found.state, found.epoch, found.loss) == ("training", 1, None)
    assert not found.has_ended
    file.write_bytes(b"")  # what a power cut may leave of a file that was not flushed
    assert read_status(file) is None


def test_each_process_has_a_part_of_the_times(tmp_path):
    file = tmp_path / "times.json"
    assert read_times(file) == ()
    parts = (RunPart(begun=1.0, seconds=4.0, spans={"reading": 3.0}), RunPart(begun=9.0, seconds=0.5))
    write_times(file, parts)
    assert read_times(file) == parts
    file.write_text('{"parts": [{"begun"', encoding="utf-8")
    assert read_times(file) == ()
