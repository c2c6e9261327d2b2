"""Interrupted predictions continue, several processes predict what one does, and failing cases are named."""

import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.data.nifti import read_label_table
from volseg.errors import ConfigError, DataError
from volseg.evaluation.folders import RECORD as FILE
from volseg.evaluation.folders import pair_files
from volseg.experiment import predict
from volseg.experiment.prediction.files import PredictionRecord
from volseg.experiment.prediction.queue import predict_in_processes

pytestmark = pytest.mark.usefixtures("ready_python")


@pytest.fixture(scope="module")
def images(task, tmp_path_factory):
    """Return a shared folder of images to predict."""
    folder = tmp_path_factory.mktemp("images")
    for source in sorted((task / "imagesTr").iterdir())[:4]:
        shutil.copy(source, folder)
    return folder


@pytest.fixture
def own_images(images, tmp_path):
    """Return a copy of the images for tests that change them."""
    return shutil.copytree(images, tmp_path / "images")


@pytest.fixture(scope="module")
def predicted(cpu_run, images, tmp_path_factory):
    """Return the results of a shared prediction of the images."""
    folder = tmp_path_factory.mktemp("predicted")
    return predict(cpu_run, [images], folder, resume=True)  # begins, as there is nothing to go on with


@pytest.fixture
def output(predicted, tmp_path):
    """Return a copy of the prediction's folder, to resume it."""
    return shutil.copytree(predicted.folder, tmp_path / "out")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.nii.gz")}


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.nii.gz")}


def test_only_label_maps_that_are_not_there_whole_are_made(cpu_run, images, predicted, output):
    """The volumes of labels are of all cases, also of those done before."""
    expected, written, listed = contents(output), times(output), (output / "volumes.csv").read_text(encoding="utf-8")
    names = read_label_table(next(iter(predicted.label_maps.values())))
    rows = []
    for case, path in sorted(predicted.label_maps.items()):
        image = nibabel.load(path)
        voxels, ml = np.asarray(image.dataobj), abs(np.linalg.det(image.affine[:3, :3])) / 1000
        rows.append({"case": case, **{names[k]: f"{(voxels == k).sum() * ml:.3f}" for k in names}})
    assert list(csv.DictReader(listed.splitlines())) == rows
    assert not [*output.glob("labels.*")]

    first, second, *_ = sorted(expected)
    (output / first).unlink()
    (output / second).write_bytes(expected[second][:-9])
    (output / "volumes.csv").unlink()
    old, young = (output / f".a.nii.gz.000000{digit}.partial" for digit in (1, 2))
    old.touch()
    young.touch()  # another process may still write it
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    again = predict(cpu_run, [images], output, resume=True, colour_tables=True)
    assert list(output.glob(".*.partial")) == [young]
    assert again.label_maps.keys() == predicted.label_maps.keys()
    assert contents(output) == expected
    assert {name for name, at in times(output).items() if at != written[name]} == {first, second}
    assert (output / "volumes.csv").read_text(encoding="utf-8") == listed
    own = (output / "labels.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert [(int(row.split()[0]), row.split('"')[1]) for row in own] == [*names.items()]
    assert len((output / "labels.ctbl").read_text(encoding="utf-8").splitlines()) == 1 + len(names)


def test_cases_are_called_without_the_runs_channel_and_evaluated_by_case(own_run, task, tmp_path):
    """Images, predictions, and reference label maps that three programs would call differently."""
    [channel] = own_run.task().modalities
    data, truth = tmp_path / "data", tmp_path / "truth"
    data.mkdir()
    truth.mkdir()
    for number, source in enumerate(sorted((task / "labelsTr").iterdir())[:2]):
        shutil.copy(task / "imagesTr" / source.name, data / f"pat{number}_{channel.lower()}.nii.gz")
        shutil.copy(source, data / f"pat{number}_seg.nii.gz")
        shutil.copy(source, truth / f"pat{number}.nii.gz")
    whole = predict(own_run, sorted(data.glob(f"*_{channel.lower()}.nii.gz")), tmp_path / "out")
    assert sorted(whole.label_maps) == ["pat0", "pat1"]
    result = CliRunner().invoke(
        app, ["evaluate", "--predictions", str(tmp_path / "out"), "--labels", str(data)], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    names = [name for value, name in own_run.task().labels.items() if value]
    assert all(f"| Dice           | {name} " in result.output for name in names), "of the run, not label_1"
    assert "mean of labels" in result.output
    assert f"summary.json and cases.csv in {tmp_path / 'out'}" in result.output
    with (tmp_path / "out" / "cases.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["case"], row["name"]) for row in csv.DictReader(file)]
    assert rows == [(f"pat{number}_seg", name) for number in range(2) for name in names]
    # As an earlier version named its predictions, beside label maps that are called by the case.
    for number in range(2):
        (tmp_path / "out" / f"pat{number}.nii.gz").rename(tmp_path / "out" / f"pat{number}_{channel}.nii.gz")
    pairs = pair_files(tmp_path / "out", truth)
    assert {case: paths[0].name for case, paths in pairs.matched.items()} == {
        f"pat{number}": f"pat{number}_{channel}.nii.gz" for number in range(2)
    }


def test_an_image_that_was_replaced_is_predicted_again(cpu_run, own_images, tmp_path):
    """Also by one of as many bytes: without compression every image of one shape is of one size."""
    output = tmp_path / "out"
    first, second, *_ = sorted(own_images.iterdir())
    scan = own_images / "scan.nii"
    volume = nibabel.load(first)
    nibabel.save(volume, scan)
    predict(cpu_run, [own_images], output)
    written, before, size = times(output), contents(output), scan.stat().st_size
    nibabel.save(nibabel.load(second), first)
    with first.open("ab") as file:  # the same bytes otherwise
        file.write(bytes(512))
    nibabel.save(nibabel.Nifti1Image(np.asarray(volume.dataobj)[::-1].copy(), volume.affine, volume.header), scan)
    assert scan.stat().st_size == size
    predict(cpu_run, [own_images], output, resume=True)
    assert {name for name, at in times(output).items() if at != written[name]} == {first.name, "scan.nii.gz"}
    assert contents(output)["scan.nii.gz"] != before["scan.nii.gz"]


def test_what_another_prediction_wrote_meanwhile_is_not_taken_for_this_ones(cpu_run, images, output, tmp_path):
    """Of two predictions in one folder, the earlier continued to write into the record of the later one."""
    settings = ["inference.mirror=true"]
    earlier = (output / FILE).read_text(encoding="utf-8").splitlines()[1:]
    later = predict(cpu_run, [images], tmp_path / "later", overrides=settings)
    begun = (tmp_path / "later" / FILE).read_text(encoding="utf-8").splitlines()[0]
    (output / FILE).write_text("\n".join([begun, *earlier]) + "\n", encoding="utf-8")
    predict(cpu_run, [images], output, overrides=settings, resume=True)
    assert contents(output) == contents(later.folder)


def test_predictions_of_other_weights_or_settings_are_not_mixed(own_run, images, output):
    settings = own_run.config_file
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("mirror: false", "mirror: true"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other settings \(inference differ\); name another folder with --output"):
        predict(own_run, [images], output, resume=True)
    settings.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"made with other settings \(checkpoint differ\)"):
        predict(own_run, [images], output, resume=True, checkpoint="best")
    task = own_run.path / "task.json"
    meant = task.read_text(encoding="utf-8")
    task.write_text(meant.replace('"2"', '"5"'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"made with other settings \(labels differ\)"):
        predict(own_run, [images], output, resume=True)
    task.write_text(meant, encoding="utf-8")
    before = contents(output)
    predict(own_run, [images], output, checkpoint="best", overwrite=True)  # all are made anew
    assert contents(output).keys() == before.keys()


def test_label_maps_of_an_earlier_prediction_are_not_taken_for_this_one(cpu_run, images, output):
    """The earlier one was of other weights; this one was begun and interrupted before its first label map."""
    lines = (output / FILE).read_text(encoding="utf-8").splitlines()
    (output / FILE).write_text(lines[0] + "\n" + lines[1][:30], encoding="utf-8")  # the last line was cut off as well
    written = times(output)
    predict(cpu_run, [images], output, resume=True)
    assert not [name for name, at in times(output).items() if at == written[name]]
    assert len(json.loads((output / FILE).read_text(encoding="utf-8").splitlines()[0])["weights"]) == 32


def test_what_cannot_be_written_or_read_is_told_before_the_first_prediction(cpu_run, own_images, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written to .*file/out \(Not a directory\); name another folder"):
        predict(cpu_run, [own_images], tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match=r"cannot be written to /proc/out .*name another folder"):
        predict(cpu_run, [own_images], type(tmp_path)("/proc/out"))
    long = own_images / ("n" * 232 + ".nii.gz")  # one byte too many, for every process and thread
    shutil.copy(next(own_images.iterdir()), long)
    with pytest.raises(ConfigError, match=r"such as n{40}, cannot .*File name too long\); .* shorter name"):
        predict(cpu_run, [own_images], tmp_path / "out")
    assert contents(tmp_path / "out") == {}
    predict(cpu_run, [long.rename(tmp_path / long.name[1:])], tmp_path / "out")
    assert (tmp_path / "out" / long.name[1:]).is_file()
    os.mkfifo(tmp_path / "scan.nii")
    with pytest.raises(DataError, match=r"scan\.nii does not exist; name image files"):
        predict(cpu_run, [tmp_path / "scan.nii"], tmp_path / "out")


def damage(images, *names):
    """Cut the files of these cases short."""
    for name in names:
        path = images / f"{name}.nii.gz"
        path.write_bytes(path.read_bytes()[:2000])


def test_a_case_that_fails_ends_no_other_and_is_named_everywhere(cpu_run, own_images, tmp_path):
    file = own_images / "synthetic_002.nii.gz"
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes())[:-2000]))
    (own_images / "synthetic_003.nii.gz").write_bytes(b"no image")
    output = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["predict", str(cpu_run.path), str(own_images), "-o", str(output)], catch_exceptions=False
    )
    assert result.exit_code == 1
    rows = [line.split("|") for line in result.stdout.splitlines() if line.startswith("| synthetic")]
    states = {row[1].strip(): row[2].strip() for row in rows}
    failed = {"synthetic_002", "synthetic_003"}
    assert {name for name, state in states.items() if state == "failed"} == failed
    assert "synthetic_002.nii.gz is truncated or damaged" in result.stdout
    assert f"4 case(s) in {output}: 2 predicted, 2 failed" in result.stdout
    assert contents(output).keys() == {"synthetic_001.nii.gz", "synthetic_004.nii.gz"}
    recorded = [json.loads(line) for line in (output / FILE).read_text(encoding="utf-8").splitlines()[1:]]
    assert {entry["case"] for entry in recorded if "error" in entry} == failed
    with pytest.raises(DataError, match=r"2 case\(s\) cannot be used:\n  synthetic_002: .*\n  synthetic_003: "):
        predict(cpu_run, [own_images], output, resume=True).require_all()
    assert [json.loads(line)["case"] for line in (output / FILE).read_text(encoding="utf-8").splitlines()[-2:]] == [
        "synthetic_002",
        "synthetic_003",
    ]


def test_strictly_nothing_is_predicted_beside_a_bad_case(cpu_run, own_images, tmp_path):
    damage(own_images, "synthetic_002", "synthetic_004")
    with pytest.raises(DataError, match=r"2 case\(s\) cannot be used:\n.*synthetic_002.*\n.*synthetic_004.*\nfix them"):
        predict(cpu_run, [own_images], tmp_path / "out", strict=True)
    assert not list((tmp_path / "out").iterdir())


def test_label_maps_that_are_there_are_replaced_by_nobody_who_does_not_ask(cpu_run, images, output):
    foreign = output / "synthetic_001.nii.gz"
    foreign.write_bytes(b"drawn by hand")
    before = times(output)
    ways = r"contains 4 of the 4 label maps, first .*synthetic_001.* --resume.* with --skip-existing.* with --overwrite"
    with pytest.raises(ConfigError, match=ways):
        predict(cpu_run, [images], output)
    with pytest.raises(ConfigError, match="exclude each other; use one of them"):
        predict(cpu_run, [images], output, resume=True, overwrite=True)
    kept = predict(cpu_run, [images], output, skip_existing=True)
    assert {case.state for case in kept.cases} == {"there before"}
    assert times(output) == before
    gone_on = predict(cpu_run, [images], output, resume=True)
    assert [case.case for case in gone_on.cases if case.state == "predicted"] == ["synthetic_001"]
    assert {case.state for case in predict(cpu_run, [images], output, overwrite=True).cases} == {"predicted"}
    assert foreign.read_bytes() != b"drawn by hand"


def test_other_settings_reach_the_label_maps_and_the_record(cpu_run, cross_validated, images, tmp_path):
    image = [images / "synthetic_001.nii.gz"]
    command = ["predict", str(cpu_run.path), str(image[0]), "--json", "-o"]
    told = CliRunner().invoke(app, [*command, str(tmp_path / "a"), "--set", "inference.mirror=true"])
    assert json.loads(told.stdout)["counts"] == {"predicted": 1, "there before": 0, "failed": 0}
    plain = predict(cpu_run, image, tmp_path / "b").label_maps
    together = predict(cross_validated, image, tmp_path / "c", uncertainty=True).label_maps
    assert len({path.read_bytes() for path in (tmp_path / "a" / "synthetic_001.nii.gz", *plain.values())}) == 2
    assert contents(tmp_path / "b") != contents(tmp_path / "c")
    entropy = nibabel.load(tmp_path / "c" / "uncertainty" / "synthetic_001.nii.gz")
    assert entropy.shape == nibabel.load(*together.values()).shape
    with pytest.raises(ConfigError, match=r"made with other settings \(also differ\)"):
        predict(cross_validated, image, tmp_path / "c", resume=True)
    with pytest.raises(ConfigError, match="inference differ"):
        predict(cpu_run, image, tmp_path / "b", resume=True, overrides=["inference.mirror=true"])
    with pytest.raises(ConfigError, match="name a folder with --output"):
        predict([cpu_run, cross_validated / "fold_1"], image)


def test_sixty_cases_two_of_them_broken_interrupted_killed_and_started_again(start, cpu_run, tmp_path):
    images, output = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    voxels = np.random.default_rng(0).normal(size=(60, 16, 16, 16)).astype(np.float32)
    for number, volume in enumerate(voxels):
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), images / f"case_{number:03d}.nii.gz")
    damage(images, "case_020", "case_050")
    command = [sys.executable, "-m", "volseg", "predict", str(cpu_run.path), str(images), "-o", str(output)]

    def end_by(number, count, *more):
        """Start a prediction, end it by a signal after so many label maps; return its output."""
        running = start([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8")
        while len(contents(output)) < count and running.poll() is None:
            time.sleep(0.005)
        running.send_signal(number)
        said = running.communicate()[1]
        assert running.returncode == (-number if number == signal.SIGKILL else 128 + number)
        return said

    said = end_by(signal.SIGTERM, 10)
    words = "volseg: interrupted; every written label map is complete; continue with --resume"
    assert words in said.splitlines()
    assert "training" not in said
    assert not list(output.glob(".*"))
    interrupted = times(output)
    assert 10 <= len(interrupted) < 58
    end_by(signal.SIGKILL, 30, "--resume")
    written, recorded = times(output), (output / FILE).read_bytes()
    assert sum(written[name] != at for name, at in interrupted.items()) <= 1  # what was written when the signal came
    again = subprocess.run([*command, "--resume", "--json"], check=False, capture_output=True)
    assert again.returncode == 1
    told = json.loads(again.stdout)
    assert len(contents(output)) == 58
    assert all(nibabel.load(output / name).get_fdata().size for name in contents(output))
    assert told["counts"]["failed"] == 2
    named = {case["case"]: case["message"] for case in told["cases"] if case["state"] == "failed"}
    assert named.keys() == {"case_020", "case_050"}
    assert all(f"{name}.nii.gz is truncated or damaged" in message for name, message in named.items())
    # Whatever was recorded stays as it is; one label map may have appeared in the moment before its line.
    now = times(output)
    computed_again = {name for name, at in written.items() if now[name] != at}
    assert len(computed_again) <= 1
    assert not any(name.removesuffix(".nii.gz").encode() in recorded for name in computed_again)
    lines = [json.loads(line) for line in (output / FILE).read_text(encoding="utf-8").splitlines()[1:]]
    made = [line["case"] for line in lines if "label_map" in line]
    assert len(made) == len(set(made)) == 58


@pytest.fixture
def scans(task, tmp_path):
    """Return a folder of scans, one of them damaged after its header."""
    folder = tmp_path / "scans"
    folder.mkdir()
    for number, image in enumerate(sorted((task / "imagesTr").glob("*.nii.gz"))[:4]):
        (folder / f"scan_{number}.nii.gz").write_bytes(image.read_bytes())
    damaged = bytearray((folder / "scan_0.nii.gz").read_bytes())
    damaged[-6] ^= 1  # of the checksum
    (folder / "scan_broken.nii.gz").write_bytes(damaged)
    return folder


def test_two_processes_predict_what_one_does(cpu_run, scans, tmp_path, caplog):
    for name in ("scan_2", "scan_3"):
        volume = nibabel.load(scans / f"{name}.nii.gz")
        voxels = np.asarray(volume.dataobj).astype(np.float32)
        voxels[0, 0, 0] = 1e20
        nibabel.save(nibabel.Nifti1Image(voxels, volume.affine), scans / f"{name}.nii.gz")
    alone = predict(cpu_run, [scans], tmp_path / "alone")
    remarks = [line for line in caplog.messages if line.startswith("look at")]
    assert any("scan_2" in line and "scan_3" in line for line in remarks)
    caplog.clear()
    (tmp_path / "together").mkdir()
    (tmp_path / "together" / "scan_broken.nii.gz").write_bytes(b"of another prediction")
    together = predict(cpu_run, [scans], tmp_path / "together", gpus=2, overwrite=True)
    # Whichever process had the scans: what they said was in their logs, which nobody reads.
    assert [line for line in caplog.messages if line.startswith("look at")] == remarks
    assert [case.state for case in together.cases] == [case.state for case in alone.cases]
    (failed,) = together.failures
    assert failed.case == "scan_broken"
    there = tmp_path / "together" / "scan_broken.nii.gz"
    assert failed.message == f"{alone.failures[0].message}; {there} is from an earlier prediction"
    for name, path in alone.label_maps.items():
        assert together.label_maps[name].read_bytes() == path.read_bytes()


def test_a_process_that_finds_other_weights_ends_the_prediction(cpu_run, scans, tmp_path, monkeypatch):
    before = property(lambda record: "of the checkpoint before", lambda record, digest: None)
    monkeypatch.setattr(PredictionRecord, "digest", before, raising=False)  # a training wrote another since
    with pytest.raises(ConfigError, match="a running training replaced the weights while the prediction started"):
        predict(cpu_run, [scans], tmp_path / "out", gpus=2)


def test_a_case_is_cut_over_gpus_of_which_there_are_more(cpu_run, scans, tmp_path, caplog):
    chosen, windows = [scans / "scan_0.nii.gz", scans / "scan_broken.nii.gz"], ["inference.window=[16,16,16]"]
    alone = predict(cpu_run, chosen, tmp_path / "alone", overrides=windows)
    with caplog.at_level("INFO"):
        together = predict(cpu_run, chosen, tmp_path / "together", overrides=windows, gpus=3, uncertainty=True)
    assert "2 case(s) on 3 GPUs: each is cut over all of them" in caplog.text
    assert [case.state for case in together.cases] == [case.state for case in alone.cases] == ["predicted", "failed"]
    assert together.label_maps["scan_0"].read_bytes() == alone.label_maps["scan_0"].read_bytes()
    assert (tmp_path / "together" / "uncertainty" / "scan_0.nii.gz").is_file()


def test_what_would_keep_every_case_from_being_written_ends_all(cpu_run, scans, tmp_path):
    """Each process failed with each of its cases in turn, as with a full disk."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "uncertainty").touch()
    with pytest.raises(ConfigError, match=r"label maps cannot be written to .*out \(.*continue with --resume"):
        predict(cpu_run, [scans], tmp_path / "out", uncertainty=True, gpus=2)


CASES = [{"case": f"case_{number}", "image": f"case_{number}.nii.gz"} for number in range(6)]

WORKER = """
import json, os, signal, sys

def say(answer):
    print(json.dumps(answer), flush=True)

order = json.loads(sys.stdin.readline())
if order.get("cannot"):
    say({"ends": order["cannot"]})
    raise SystemExit(1)
while say({"asks": True}) or (case := json.loads(sys.stdin.readline())):
    if case["case"] in order["dies_with"]:
        print("the GPU fell off the bus", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    [file] = case["image"]
    told = {"state": "predicted", "error": "", "message": "", "seconds": {"read": 0.5}}
    say({"case": case["case"], "file": file, **told})
"""
"""A process that predicts, in a few lines: one of ours takes seconds to import what it needs."""


PLAYED = [sys.executable, "-c", WORKER]


@pytest.mark.parametrize("dying", [[], ["case_2"], [case["case"] for case in CASES]], ids=["none", "one", "all"])
def test_each_case_is_asked_for_once_and_a_process_that_dies_is_named(dying):
    results = list(predict_in_processes(CASES, [None, "1"], {"dies_with": dying}, PLAYED))
    assert sorted(result.case for result in results) == [case["case"] for case in CASES]
    lost = [result for result in results if "all prediction processes have failed" in result.message]
    killed = [result for result in results if result.state == "failed" and result not in lost]
    assert len(killed) == min(len(dying), 2), "each process dies once"
    assert len(lost) == len(dying) - len(killed)
    for result in killed:
        assert "was killed by SIGKILL: the usual cause is a lack of memory" in result.message
        assert "| the GPU fell off the bus" in result.message
    for result in (result for result in results if result.state == "predicted"):
        assert str(result.file) == f"{result.case}.nii.gz"
        assert result.seconds == {"read": 0.5}


def test_processes_that_die_before_their_first_case_say_why():
    """The error of each case only referred to the other cases."""
    command = [sys.executable, "-c", "raise SystemExit('the driver is too old')"]
    results = list(predict_in_processes(CASES, [None, None], {}, command))
    assert [result.case for result in results] == [case["case"] for case in CASES]
    words = "process 1 (CPU) failed with exit code 1; the last lines of its log:\n  | the driver is too old"
    assert all(words in result.message for result in results)


def test_an_error_that_is_no_cases_own_ends_all():
    with pytest.raises(ConfigError, match=r"^the disk is full$"):
        list(predict_in_processes(CASES, [None, None], {"dies_with": [], "cannot": "the disk is full"}, PLAYED))


def list_children():
    """Return the child processes of this one; see also `ready_python`, which keeps one."""
    return {
        int(number)
        for file in Path("/proc/self/task").glob("*/children")
        for number in file.read_text(encoding="ascii").split()
    }


def test_who_stops_listening_leaves_no_process():
    list(predict_in_processes([], [None], {"dies_with": []}, PLAYED))
    before = list_children()
    results = predict_in_processes(CASES, [None, None], {"dies_with": []}, PLAYED)
    next(results)
    begun = list_children()
    results.close()
    assert len(begun - before) == 2
    assert list_children() == before
