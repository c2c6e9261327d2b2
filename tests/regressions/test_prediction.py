"""Predictions and scores that were attacked where parts meet: each of these was wrong in silence once."""

import nibabel as nib
import numpy as np
import pytest

from volseg.errors import CheckpointError, DataError
from volseg.evaluation.comparing import compare_methods, read_method
from volseg.evaluation.folders import evaluate_folders, load_label_names, pair_files
from volseg.evaluation.summary import complete_summary, write_summary
from volseg.exchange.archive import is_archive, read_archive, write_archive


def write(path, side=3, value=1):
    """Write a label map of a cube."""
    voxels = np.zeros((8, 8, 8), np.uint8)
    voxels[1 : 1 + side, 1 : 1 + side, 1 : 1 + side] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), path)


def test_numbered_cases_are_not_paired_with_each_other(tmp_path):
    """The prediction of scan_0011 was scored with the label of scan_0010, as if both were channels of one case."""
    for name in ("scan_0001", "scan_0011"):
        write(tmp_path / "out" / f"{name}.nii.gz")
    for name in ("scan_0001", "scan_0010"):
        write(tmp_path / "labels" / f"{name}.nii.gz")
    pairs = pair_files(tmp_path / "out", tmp_path / "labels")
    assert list(pairs.matched) == ["scan_0001"]
    assert pairs.missing == ("scan_0010",)
    assert [path.name for path in pairs.surplus] == ["scan_0011.nii.gz"]
    write(tmp_path / "out" / "scan_0012.nii.gz")  # two predictions more than labels were refused as one case's
    assert len(pair_files(tmp_path / "out", tmp_path / "labels").surplus) == 2


def test_two_labels_of_one_name_are_not_taken_for_one_prediction(tmp_path):
    write(tmp_path / "out" / "a_pred.nii.gz")
    for name in ("a", "a_seg"):
        write(tmp_path / "labels" / f"{name}.nii.gz")
    with pytest.raises(DataError, match=r"a\.nii\.gz, a_seg\.nii\.gz, which may all be case a; keep one"):
        pair_files(tmp_path / "out", tmp_path / "labels")


def test_a_value_with_two_names_is_refused():
    with pytest.raises(DataError, match=r"got '1=a,01=b', which names 1 twice"):
        load_label_names("labels", "predictions", "1=a,01=b")


def score(tmp_path, name, *, truth=3, names="1=liver", tolerance=1.0):
    """Score predictions of two cases, write their summary, and return it to be compared."""
    for case in ("a", "b"):
        write(tmp_path / name / f"{case}.nii.gz", side=2)
        write(tmp_path / f"{name}_labels" / f"{case}.nii.gz", side=truth)
    found = evaluate_folders(tmp_path / name, tmp_path / f"{name}_labels", names=names, tolerance=tolerance)
    write_summary(complete_summary(found.summary, found.scoring, found.names), tmp_path / name / "summary.json")
    return read_method(tmp_path / name)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"names": "1=tumour"}, r"labels differ in 1 \(liver and tumour\)"),
        ({"tolerance": 2.0}, r"settings differ in tolerance_mm \(\{'1': 1\.0\} and \{'1': 2\.0\}\)"),
        ({"truth": 4}, r"same true label maps: of label 1 case a has 27 and 64 voxels"),
    ],
)
def test_scores_of_other_labels_rules_or_truth_are_not_compared_and_others_are(tmp_path, other, why):
    methods = [score(tmp_path, "one"), score(tmp_path, "two", **other)]
    with pytest.raises(DataError, match=why):
        compare_methods(methods)
    assert len(compare_methods([methods[0], score(tmp_path, "same")])) > 1


def test_an_archive_with_a_damaged_version_is_told_apart_without_a_traceback(tmp_path):
    """zipfile raises NotImplementedError where a byte of its directory says that a later version is needed."""
    content = bytearray(write_archive(tmp_path / "model.zip", {}, {"a": b"1"}).read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = 148
    (tmp_path / "model.zip").write_bytes(content)
    assert not is_archive(tmp_path / "model.zip")
    with pytest.raises(CheckpointError, match="is damaged, or no file of volseg export"):
        read_archive(tmp_path / "model.zip")
