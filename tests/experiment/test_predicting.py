"""A prediction that was interrupted goes on, and says what keeps it from writing before hours of work."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import nibabel
import pytest

from volseg.errors import ConfigError, DataError
from volseg.experiment import predict, train
from volseg.experiment.prediction_record import FILE


@pytest.fixture
def outcome(configured):
    return train(configured("training.epochs=1", "training.iterations=1"))


@pytest.fixture
def images(task, tmp_path):
    """Return a folder of images to predict."""
    folder = tmp_path / "images"
    folder.mkdir()
    for source in sorted((task / "imagesTr").iterdir())[:4]:
        shutil.copy(source, folder)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.nii.gz")}


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.nii.gz")}


def test_only_label_maps_that_are_not_there_whole_are_made(outcome, images, tmp_path):
    output = tmp_path / "out"
    whole = predict(outcome.folder, [images], output)
    expected, written = contents(output), times(output)
    names = sorted(expected)
    (output / names[0]).unlink()
    (output / names[1]).write_bytes(expected[names[1]][:-9])
    assert predict(outcome.folder, [images], output, resume=True).label_maps == whole.label_maps
    assert contents(output) == expected
    again = times(output)
    assert {name for name in names if again[name] != written[name]} == {*names[:2]}


def test_an_image_that_was_replaced_is_predicted_again(outcome, images, tmp_path):
    output = tmp_path / "out"
    predict(outcome.folder, [images], output)
    written = times(output)
    first, second = sorted(images.iterdir())[:2]
    nibabel.save(nibabel.load(second), first)
    with first.open("ab") as file:  # the same bytes otherwise
        file.write(bytes(512))
    predict(outcome.folder, [images], output, resume=True)
    assert [name for name, at in times(output).items() if at != written[name]] == [first.name]


def test_nothing_to_go_on_with_begins(outcome, images, tmp_path):
    assert len(predict(outcome.folder, [images], tmp_path / "out", resume=True).label_maps) == 4


def test_predictions_of_other_weights_or_settings_are_not_mixed(outcome, images, tmp_path, configured):
    output = tmp_path / "out"
    predict(outcome.folder, [images], output)
    settings = outcome.folder.config_file
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("mirror: false", "mirror: true"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"made otherwise \(inference differ\); name another folder by --output, or"):
        predict(outcome.folder, [images], output, resume=True)
    settings.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"made otherwise \(checkpoint differ\)"):
        predict(outcome.folder, [images], output, resume=True, checkpoint="best")
    before = contents(output)
    predict(outcome.folder, [images], output, checkpoint="best", overwrite=True)  # all are made anew
    assert contents(output).keys() == before.keys()


def test_label_maps_of_an_earlier_prediction_are_not_taken_for_this_one(outcome, images, tmp_path):
    """The earlier one was of other weights; this one was begun and interrupted before its first label map."""
    output = tmp_path / "out"
    predict(outcome.folder, [images], output)
    lines = (output / FILE).read_text(encoding="utf-8").splitlines()
    (output / FILE).write_text(lines[0] + "\n" + lines[1][:30], encoding="utf-8")  # the last line was cut off as well
    written = times(output)
    predict(outcome.folder, [images], output, resume=True)
    assert not [name for name, at in times(output).items() if at == written[name]]
    assert len(json.loads((output / FILE).read_text(encoding="utf-8").splitlines()[0])["weights"]) == 32


def test_what_cannot_be_written_is_told_before_the_first_prediction(outcome, images, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written to .*file/out \(Not a directory\); name another folder"):
        predict(outcome.folder, [images], tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match=r"cannot be written to /proc/out .*name another folder by --output"):
        predict(outcome.folder, [images], type(tmp_path)("/proc/out"))
    long = images / ("n" * 235 + ".nii.gz")
    shutil.copy(next(images.iterdir()), long)
    with pytest.raises(ConfigError, match=r"File name too long\); rename n{40}\.\.\., of 235 characters, to a shorter"):
        predict(outcome.folder, [images], tmp_path / "out")
    assert contents(tmp_path / "out") == {}


def test_a_pipe_is_no_image(outcome, tmp_path):
    os.mkfifo(tmp_path / "scan.nii")
    with pytest.raises(DataError, match=r"scan\.nii is neither a file nor a folder"):
        predict(outcome.folder, [tmp_path / "scan.nii"], tmp_path / "out")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_prediction_goes_on(start, outcome, images, tmp_path, number):
    for copy in range(30):
        shutil.copy(images / "synthetic_001.nii.gz", images / f"more_{copy:02d}.nii.gz")
    output = tmp_path / "out"
    command = [sys.executable, "-m", "volseg", "predict", str(outcome.folder.path), str(images), "-o", str(output)]
    running = start(command, stderr=subprocess.PIPE, encoding="utf-8")
    while len(contents(output)) < 3 and running.poll() is None:
        time.sleep(0.005)
    running.send_signal(number)
    said = running.communicate()[1]
    assert running.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    written = times(output)
    assert 3 <= len(written) < 34
    if number != signal.SIGKILL:
        words = "volseg: interrupted; the label maps that are written are whole, go on with the others by --resume"
        assert words in said.splitlines()
        assert "training" not in said
        assert not list(output.glob(".*"))
    subprocess.run([*command, "--resume"], check=True, capture_output=True)
    again = times(output)
    assert len(again) == 34
    assert sum(again[name] != at for name, at in written.items()) <= 1  # what was written when the signal came
    assert all(nibabel.load(output / name).get_fdata().size for name in again)
