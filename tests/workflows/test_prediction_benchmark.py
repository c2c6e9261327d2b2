"""The benchmark of predictions: its rows run, and one that is interrupted or fails does not lose others."""

import json
import sys

import nibabel
import prediction
import pytest

TINY = ["--device", "cpu", "--window", "8", "8", "8", "--filters", "2", "2", "2"]
CASE = "12x9x10x3"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prediction.py", *TINY, *map(str, arguments)])
    prediction.main()


@pytest.mark.parametrize(("row", "spacing"), [("ours", "network"), ("ours", "file"), ("monai", "network")])
def test_a_row_is_measured_in_this_process(monkeypatch, capsys, tmp_path, row, spacing):
    run(monkeypatch, "--only", row, CASE, "--scratch", tmp_path, "--spacing", spacing)
    measured = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    own = {"of_read_the_file"} if row != "monai" else set()
    assert measured["seconds"].keys() == {"read", "compute", "resample", "write", "all"} | own
    assert all(seconds > 0 for seconds in measured["seconds"].values())
    assert measured["host_above_image_gib"] <= measured["host_peak_gib"]
    [written] = [path for path in tmp_path.iterdir() if path.name.startswith(row)]
    assert nibabel.load(written).shape == (12, 9, 10)


@pytest.mark.usefixtures("ready_python")
def test_a_row_that_is_cut_says_so_and_the_next_is_measured(monkeypatch, tmp_path):
    result = tmp_path / "prediction.json"
    run(monkeypatch, "--cases", CASE, "--rows", "monai", "--seconds", "0.01", "--result", result)
    run(monkeypatch, "--cases", CASE, "--rows", "ours", "--seconds", "300", "--result", result)
    found = {row["row"]: row for row in json.loads(result.read_text(encoding="utf-8"))["rows"]}
    assert found["monai"]["failed"] == "cut after 0 s"
    assert found["ours"]["seconds"]["all"] > 0
    run(monkeypatch, "--cases", CASE, "--rows", "ours", "--total", "-1", "--result", result)
    found = {row["row"]: row for row in json.loads(result.read_text(encoding="utf-8"))["rows"]}
    assert found["ours"]["failed"].startswith("not begun")
    assert "monai" in found


def test_ours_is_compared_with_each_row_that_came_to_its_end(monkeypatch, tmp_path):
    seconds = {"ours": 2.0, "monai": 10.0, "nnunet": 30.0}

    def measure(row, case, chosen):
        found = {"seconds": {"compute": seconds[row] / 2, "all": seconds[row]}}
        return found | ({"failed": "cut"} if row == "nnunet" else {})

    monkeypatch.setattr(prediction, "measure_apart", measure)  # the processes, which the test above is about
    result = tmp_path / "prediction.json"
    run(monkeypatch, "--cases", CASE, "--rows", "ours", "monai", "nnunet", "--result", result)
    faster = json.loads(result.read_text(encoding="utf-8"))["ours_is_faster_by"]
    assert faster == {f"{CASE}, network": {"monai": {"compute": 5.0, "all": 5.0}}}
