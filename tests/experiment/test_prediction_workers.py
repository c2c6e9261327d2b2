"""Cases that several processes predict come to what one process makes of them; a process that fails is named."""

import sys
from pathlib import Path

import pytest

from volseg.errors import ConfigError
from volseg.experiment import predict
from volseg.experiment.prediction.queue import predict_in_processes

pytestmark = pytest.mark.usefixtures("ready_python")


@pytest.fixture
def images(task, tmp_path):
    """Return a folder of images, one of which is damaged behind its header."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, image in enumerate(sorted((task / "imagesTr").glob("*.nii.gz"))[:4]):
        (folder / f"scan_{number}.nii.gz").write_bytes(image.read_bytes())
    damaged = bytearray((folder / "scan_0.nii.gz").read_bytes())
    damaged[-6] ^= 1  # of the checksum
    (folder / "scan_broken.nii.gz").write_bytes(damaged)
    return folder


def test_two_processes_predict_what_one_does(own_run, images, tmp_path, caplog):
    (images / "scan_again.nii.gz").write_bytes((images / "scan_2.nii.gz").read_bytes())
    alone = predict(own_run, [images], tmp_path / "alone")
    remarks = [line for line in caplog.messages if line.startswith("look at")]
    assert any("scan_again" in line and "scan_2" in line for line in remarks)
    caplog.clear()
    (tmp_path / "together").mkdir()
    (tmp_path / "together" / "scan_broken.nii.gz").write_bytes(b"of another prediction")
    together = predict(own_run, [images], tmp_path / "together", gpus=2, overwrite=True)
    # Whichever process had the images: what they said was in their logs, which nobody reads.
    assert [line for line in caplog.messages if line.startswith("look at")] == remarks
    assert [case.state for case in together.cases] == [case.state for case in alone.cases]
    (failed,) = together.failures
    assert failed.case == "scan_broken"
    there = tmp_path / "together" / "scan_broken.nii.gz"
    assert failed.message == f"{alone.failures[0].message}; {there} is there, of an earlier prediction"
    for name, path in alone.label_maps.items():
        assert together.label_maps[name].read_bytes() == path.read_bytes()


def test_a_case_is_cut_over_gpus_of_which_there_are_more(own_run, images, tmp_path, caplog):
    chosen, windows = [images / "scan_0.nii.gz", images / "scan_broken.nii.gz"], ["inference.window=[16,16,16]"]
    alone = predict(own_run, chosen, tmp_path / "alone", overrides=windows)
    with caplog.at_level("INFO"):
        together = predict(own_run, chosen, tmp_path / "together", overrides=windows, gpus=3, uncertainty=True)
    assert "2 case(s) on 3 GPUs: each is cut over all of them" in caplog.text
    assert [case.state for case in together.cases] == [case.state for case in alone.cases] == ["predicted", "failed"]
    assert together.label_maps["scan_0"].read_bytes() == alone.label_maps["scan_0"].read_bytes()
    assert (tmp_path / "together" / "uncertainty" / "scan_0.nii.gz").is_file()


def test_what_would_keep_every_case_from_being_written_ends_all(own_run, images, tmp_path):
    """Each process failed with each of its cases in turn, as with a full disk."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "uncertainty").touch()
    with pytest.raises(ConfigError, match=r"label maps cannot be written to .*out \(.*go on by --resume"):
        predict(own_run, [images], tmp_path / "out", uncertainty=True, gpus=2)


def test_a_config_that_takes_several_gpus_is_told_what_that_means(own_run, images, tmp_path):
    with pytest.raises(ConfigError, match="--gpus 2 predicts each case on one GPU, but"):
        predict(own_run, [images], tmp_path / "out", overrides=["parallel={strategy: pipeline, devices: 2}"], gpus=2)


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


def test_each_case_is_asked_for_once():
    results = list(predict_in_processes(CASES, [None, None, None], {"dies_with": []}, PLAYED))
    assert sorted(result.case for result in results) == [case["case"] for case in CASES]
    assert all(str(result.file) == f"{result.case}.nii.gz" for result in results)
    assert all(result.seconds == {"read": 0.5} for result in results)


def test_a_process_that_dies_is_named_and_the_others_go_on():
    results = {
        result.case: result for result in predict_in_processes(CASES, [None, "1"], {"dies_with": ["case_2"]}, PLAYED)
    }
    assert sorted(results) == [case["case"] for case in CASES]
    failed = [result for result in results.values() if result.state == "failed"]
    assert [result.case for result in failed] == ["case_2"]
    assert "was killed by SIGKILL: the usual cause is a lack of memory" in failed[0].message
    assert "| the GPU fell off the bus" in failed[0].message


def test_where_all_processes_die_the_rest_is_told():
    order = {"dies_with": [case["case"] for case in CASES]}
    results = {result.case: result for result in predict_in_processes(CASES, [None, None], order, PLAYED)}
    assert sorted(results) == [case["case"] for case in CASES]
    assert all(result.state == "failed" for result in results.values())
    assert sum("every process that predicted has failed" in result.message for result in results.values()) == 4


def test_processes_that_die_before_their_first_case_say_why():
    """All that was said of each case was: see what became of the other cases."""
    command = [sys.executable, "-c", "raise SystemExit('the driver is too old')"]
    results = list(predict_in_processes(CASES, [None, None], {}, command))
    assert [result.case for result in results] == [case["case"] for case in CASES]
    for result in results:
        assert (
            "process 1 (CPU) failed with exit code 1; the last lines of its log:\n  | the driver is too old"
            in result.message
        )


def test_an_error_that_is_no_cases_own_ends_all():
    with pytest.raises(ConfigError, match=r"^the disk is full$"):
        list(predict_in_processes(CASES, [None, None], {"dies_with": [], "cannot": "the disk is full"}, PLAYED))


def list_children():
    """Return the processes that this one has started; see also `ready_python`, which keeps one."""
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
