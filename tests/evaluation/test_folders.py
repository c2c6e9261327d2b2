"""Scoring any program's predictions: pairing of files, labels, bad cases, files of evaluate and compare."""

import csv
import json
import math

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.data.readers import read_volume
from volseg.errors import ConfigError, DataError
from volseg.evaluation.folders import evaluate_folders, load_label_names, pair_files
from volseg.inference.writing import write_prediction

AFFINE = np.diag([1.0, 1.0, 2.0, 1.0])


def write(path, start=1, stop=5, value=1, affine=AFFINE, size=8):
    voxels = np.zeros((size, 8, 8), np.uint8)
    voxels[start:stop, 2:6, 2:6] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)


@pytest.fixture
def folders(tmp_path):
    """Return predictions and labels of four cases; those predicted later are further off."""
    task = tmp_path / "Dataset001_Mine"
    for number in range(4):
        write(task / "labelsTr" / f"case_{number}.nii.gz")
        write(tmp_path / "out" / f"case_{number}.nii.gz", 1 + number, 5 + number)
    declared = {"labels": {"background": 0, "liver": 1}, "channel_names": {"0": "CT"}, "file_ending": ".nii.gz"}
    (task / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    return tmp_path / "out", task / "labelsTr"


def evaluate(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "200"})


def test_evaluate_writes_table_json_and_csv(folders):
    predictions, labels = folders
    result = evaluate("--predictions", predictions, "--labels", labels, "--tolerance", 1)
    assert result.exit_code == 0, result.output
    assert "| HD95 (mm)      | liver | 1.500 " in result.output
    assert "NSD: within 1 mm" in result.output
    told = json.loads((predictions / "summary.json").read_text(encoding="utf-8"))
    assert told["mean"]["1"]["HD"] == 1.5
    assert told["labels"] == {"1": "liver"}
    with (predictions / "cases.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["label"], row["name"], float(row["HD"])) for row in rows] == [
        (f"case_{number}", "1", "liver", number) for number in range(4)
    ]
    again = evaluate("--predictions", predictions, "--labels", labels)
    assert isinstance(again.exception, ConfigError)
    assert "summary.json exists; choose" in str(again.exception)
    assert evaluate("--predictions", predictions, "--labels", labels.parent, "--overwrite").exit_code == 0
    elsewhere = labels.parent / "scores"
    printed = evaluate("--predictions", predictions, "--labels", labels, "-o", elsewhere, "--json")
    assert json.loads(printed.stdout) == json.loads((elsewhere / "summary.json").read_text(encoding="utf-8"))
    assert (elsewhere / "cases.csv").is_file()


def test_bad_cases_are_named_and_the_others_scored(folders):
    predictions, labels = folders
    shifted = AFFINE.copy()
    shifted[0, 3] = 7
    write(predictions / "case_1.nii.gz", affine=shifted)
    write(predictions / "case_2.nii.gz", size=9)
    (predictions / "case_3.nii.gz").write_bytes(b"no gzip")
    write(predictions / "more.nii.gz")
    result = evaluate("--predictions", predictions, "--labels", labels)
    assert result.exit_code == 1
    assert "1 of 4 case(s)" in result.output
    assert "could not be scored: case_1" in result.output
    assert "is up to 7 mm away" in result.output
    assert "must have the same shape" in result.output
    assert "case_3.nii.gz" in result.output
    assert "without a label, not scored: more.nii.gz" in result.output
    told = json.loads((predictions / "summary.json").read_text(encoding="utf-8"))
    assert [case["metrics"]["1"]["Dice"] for case in told["metric_per_case"]] == [1.0]


def test_missing_predictions_are_an_error_unless_they_are_allowed(folders):
    predictions, labels = folders
    (predictions / "case_2.nii.gz").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of 4 case\(s\): case_2; .*--allow-missing"):
        evaluate_folders(predictions, labels)
    evaluated = evaluate_folders(predictions, labels, allow_missing=True)
    assert evaluated.pairs.missing == ("case_2",)
    assert len(evaluated.summary["metric_per_case"]) == 3


@pytest.fixture
def write_names(tmp_path):
    """Return a function that writes predictions and labels of these names, and their folders."""

    def write_both(predictions, labels):
        for folder, names in (("out", predictions), ("labels", labels)):
            for name in names.split():
                write(tmp_path / folder / f"{name}.nii.gz")
        return tmp_path / "out", tmp_path / "labels"

    return write_both


def test_names_are_paired_without_channels_and_words(write_names):
    both = write_names("a_0000 b_pred c.mha d_0001", "a b_seg c.mha d_0001 d_0002")
    pairs = pair_files(*both)
    assert {case: pair[0].name.removesuffix(".nii.gz") for case, pair in pairs.matched.items()} == {
        "a": "a_0000",
        "b_seg": "b_pred",
        "c.mha": "c.mha",
        "d_0001": "d_0001",  # whose number is part of its name
    }
    assert pairs.missing == ("d_0002",)
    for further in (("a_seg", ""), ("", "a_seg")):
        write_names(*further)
        with pytest.raises(DataError, match=r"a_0000.nii.gz, .*a_seg.nii.gz.* may all be case a; keep one of each"):
            pair_files(*both)
        for folder in both:
            (folder / "a_seg.nii.gz").unlink(missing_ok=True)
    write_names("a_0001", "")
    with pytest.raises(DataError, match=r"a_0000.nii.gz and a_0001.nii.gz .* two channels of the image a"):
        pair_files(*both)


def test_folders_that_cannot_be_paired_are_refused(write_names, tmp_path):
    out, labels = write_names("pat13_final pat14_final", "pat13 pat14")
    words = r"no case is in both .*out \(pat13_final, .*labels \(pat13, .*a table \(CSV\)"
    with pytest.raises(DataError, match=words):
        pair_files(out, labels)
    with pytest.raises(DataError, match="is not a folder"):
        pair_files(tmp_path / "absent", labels)
    write_names("pat14", "")
    with pytest.raises(DataError, match=r"lacks 1 of 2 case\(s\): pat13; .*--allow-missing; files are paired"):
        evaluate_folders(out, labels)
    (out / "predicted.jsonl").write_text('{"channels": ["t1"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"predicted\.jsonl does not begin with a description of predictions"):
        pair_files(out, labels)
    write(out / "pat14.nii")
    with pytest.raises(DataError, match="of one case; keep one"):
        pair_files(out, labels)


def test_a_table_says_which_prediction_is_of_which_case(tmp_path):
    for name, start in (("first", 1), ("second", 3), ("other", 1)):
        write(tmp_path / "out" / f"{name}.nii.gz", start, start + 4)
    for number in (13, 14):
        write(tmp_path / "data" / f"pat{number}" / "truth.nii.gz")
    table = tmp_path / "pairs.csv"
    rows = ["case,prediction,label,labelled"]
    rows += ["pat13,first.nii.gz,data/pat13/truth.nii.gz,", "pat14,second.nii.gz,data/pat14/truth.nii.gz,1"]
    table.write_text("\n".join(rows), encoding="utf-8")
    result = evaluate("--predictions", tmp_path / "out", "--labels", table, "--names", "1=liver,2=tumour")
    assert result.exit_code == 0, result.output
    assert "without a label, not scored: other.nii.gz" in result.output
    with (tmp_path / "out" / "cases.csv").open(encoding="utf-8", newline="") as file:
        found = {(row["case"], row["name"]): row["Dice"] for row in csv.DictReader(file)}
    assert found == {
        ("first", "liver"): "1.0",
        ("second", "liver"): "0.5",
        ("first", "tumour"): "",
        ("second", "tumour"): "",
    }
    table.write_text("\n".join([*rows, "pat15,,data/pat13/truth.nii.gz,"]), encoding="utf-8")
    with pytest.raises(DataError, match=r"lacks 1 of 3 case\(s\): pat15"):
        evaluate_folders(tmp_path / "out", table)
    for wrong, message in (
        ([*rows, "pat13,other.nii.gz,data/pat14/truth.nii.gz,"], "lists 'pat13' twice"),
        ([*rows, "pat15,first.nii.gz,data/pat14/truth.nii.gz,"], r"lists 'first\.nii\.gz' twice"),
        ([rows[0], "pat13,absent.nii.gz,data/pat13/truth.nii.gz,"], "names no prediction in"),
    ):
        table.write_text("\n".join(wrong), encoding="utf-8")
        with pytest.raises(DataError, match=message):
            pair_files(tmp_path / "out", table)
    table.write_text("case,label\nfirst,data/pat13/truth.nii.gz\n", encoding="utf-8")
    assert pair_files(tmp_path / "out", table).matched["first"][0] == tmp_path / "out" / "first.nii.gz"


def test_label_maps_of_a_data_set_are_found_beside_its_images(tmp_path):
    for name in ("pat13_t1", "pat13_seg", "pat14_t1", "pat14_seg"):
        write(tmp_path / "data" / f"{name}.nii.gz")
    for name in ("pat13", "pat14_t1"):
        write(tmp_path / "out" / f"{name}.nii.gz")
    declared = {"labels": {"0": "background", "1": "liver"}, "channel_names": {"0": "t1"}}
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    pairs = pair_files(tmp_path / "out", tmp_path / "data")
    assert {case: [path.name for path in paths] for case, paths in pairs.matched.items()} == {
        "pat13": ["pat13.nii.gz", "pat13_seg.nii.gz"],
        "pat14": ["pat14_t1.nii.gz", "pat14_seg.nii.gz"],
    }


def test_labels_are_named_found_or_taken_from_the_files(folders, tmp_path):
    predictions, labels = folders
    assert load_label_names(labels, predictions).structures == {1: "liver"}
    assert load_label_names(labels, predictions, "1=organ,3=tumour").structures == {1: "organ", 3: "tumour"}
    assert load_label_names(tmp_path, predictions, str(labels.parent / "dataset.json")).structures == {1: "liver"}
    for wrong in ("1=", "organ=1", "=x"):
        with pytest.raises(DataError, match="label names must be written as 1=liver,2=tumour"):
            load_label_names(labels, predictions, wrong)
    with pytest.raises(DataError, match=r"is not a dataset.json with 'labels'"):
        load_label_names(labels, predictions, str(predictions))
    (labels.parent / "dataset.json").unlink()
    write(predictions / "case_3.nii.gz", value=4)
    evaluated = evaluate_folders(predictions, labels)
    assert evaluated.names == {"1": "label_1", "4": "label_4"}
    first = min(predictions.iterdir())
    write_prediction(read_volume(first), read_volume(first), first, {1: "liver", 4: "tumour"})
    assert load_label_names(labels, predictions).structures == {1: "liver", 4: "tumour"}, "of the file's header"
    image = nibabel.load(first)
    image.header.extensions[:] = [nibabel.nifti1.NiftiExtension(30, image.header.extensions[0].content)]
    nibabel.save(nibabel.Nifti1Image(image.get_fdata(), None, image.header), first)
    assert load_label_names(labels, predictions).structures == {1: "liver", 4: "tumour"}, "of Caret's extension"
    first.write_bytes(b"damaged: this ends no evaluation")
    assert load_label_names(labels, predictions) is None
    assert evaluated.summary["mean"]["4"]["Dice"] == 0
    assert not evaluated.scoring.tolerances


def test_only_what_is_asked_for_is_measured(folders):
    arguments = ["--predictions", folders[0], "--labels", folders[1], "--overwrite"]
    assert evaluate(*arguments, "--lesions", "liver").exit_code == 0
    told = json.loads((folders[0] / "summary.json").read_text(encoding="utf-8"))
    assert told["mean"]["1"]["lesion_recall"] == 1.0  # the last shares 1 of 7 planes, which is enough
    result = evaluate(*arguments, "--metrics", "dice,iou")
    assert result.exit_code == 0, result.output
    assert "HD95" not in result.output + (folders[0] / "summary.json").read_text(encoding="utf-8")
    for wrong, message in (("dise", "did you mean 'Dice'"), ("nsd", "--tolerance MM")):
        result = evaluate(*arguments, "--metrics", wrong)
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


def test_compare_pairs_cases_and_writes_what_it_says(folders, tmp_path):
    predictions, labels = folders
    for number in range(4):
        write(tmp_path / "better" / f"case_{number}.nii.gz", 1 + number // 2, 5 + number // 2)
    for folder in (predictions, tmp_path / "better"):
        assert evaluate("--predictions", folder, "--labels", labels).exit_code == 0
    arguments = ["compare", str(predictions), str(tmp_path / "better"), "-o", str(tmp_path / "comparison")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "| HD95   | liver | better - out | 0.5000 - 1.5000 | -1.0000 " in result.output
    assert "3/0/1 of 4" in result.output
    told = json.loads((tmp_path / "comparison" / "comparison.json").read_text(encoding="utf-8"))
    assert told["cases"] == ["case_0", "case_1", "case_2", "case_3"]
    [hausdorff] = [row for row in told["results"] if row["metric"] == "HD95"]
    assert hausdorff["differences"] == [0, -1, -1, -2]
    assert math.isclose(hausdorff["mean_difference"], -1)
    (predictions / "summary.json").unlink()
    with pytest.raises(DataError, match=r"has no summary.json or validation/summary.json"):
        CliRunner().invoke(app, [*arguments, "--overwrite"], catch_exceptions=False)
