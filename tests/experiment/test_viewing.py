"""`volseg view` finds images and label maps of runs, predictions, data sets and files."""

import json
import re
import shutil

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.data.labels import format_label_table
from volseg.errors import ConfigError, DataError
from volseg.experiment import RunFolder, predict, view
from volseg.inference.writing import LABEL_TABLE
from volseg.reporting import viewer


@pytest.fixture(autouse=True)
def without_niivue(monkeypatch, tmp_path):
    """Write pages without the script that npm fetches, and into a folder of the test's own."""
    monkeypatch.setattr(viewer, "read_niivue", lambda: "")
    monkeypatch.chdir(tmp_path)


def read_page(page):
    """Return titles of layers by case, in the order of the page, and the names of labels that occur."""
    found = re.search(r'<script id="viewed"[^>]*>(.*?)</script>', page.read_text(encoding="utf-8"))
    viewed = json.loads(found[1])
    cases = {case["title"]: [layer["title"] for layer in case["layers"]] for case in viewed["cases"]}
    return cases, [label["name"] for label in viewed["labels"] if label["occurs"]]


def test_a_run_shows_predictions_beside_references_worst_first(trained, task, monkeypatch, tmp_path):
    run = RunFolder(shutil.copytree(trained.folder.path, tmp_path / "run"))
    page = view(run.path)
    assert page == run.path / "view.html"
    cases, names = read_page(page)
    assert list(cases.values()) == [["reference", "prediction"]] * len(run.split().validation)
    dice = [float(re.search(r"\(Dice (.+)\)", title)[1]) for title in cases]
    assert dice == sorted(dice)
    assert set(names) == set(run.task().foreground.values())
    assert view(run.path) == page  # as the report is
    last = list(cases)[-1].split()[0]
    assert [title.split()[0] for title in read_page(view(run.path, cases=[last]))[0]] == [last]
    with pytest.raises(ConfigError, match=r"unknown case 'synthetic_00x'; did you mean 'synthetic_00"):
        view(run.path, cases=["synthetic_00x"])
    moved = task.rename(task.with_name("moved"))
    try:
        with pytest.raises(DataError, match=r"does not exist; .* --set data\.root=FOLDER"):
            view(run.path)
        assert read_page(view(run.path, overrides=[f"data.root={moved}"]))[0] == cases
    finally:
        moved.rename(task)
    (run.validation / f"{last}.nii.gz").unlink()
    assert [layers for title, layers in read_page(view(run.path))[0].items() if last in title] == [["reference"]]


def test_a_cross_validation_shows_the_cases_of_all_folds(cross_validated, task, tmp_path):
    cases, _ = read_page(view(cross_validated, output=tmp_path / "page.html"))
    assert len(cases) == 6
    assert set(map(tuple, cases.values())) == {("reference", "prediction")}


def test_predictions_are_shown_over_the_images_that_they_are_of(own_run, task, tmp_path):
    predict(own_run.path, task / "imagesTr", tmp_path / "predictions")
    page = view(tmp_path / "predictions", [task / "labelsTr"])
    assert page == tmp_path / "predictions" / "view.html"
    cases, names = read_page(page)
    assert list(cases.values()) == [["prediction", "labelsTr"]] * 6
    assert set(names) == set(own_run.task().foreground.values())  # of the label table in the headers


def test_a_data_set_and_further_label_maps(task, tmp_path):
    other = shutil.copytree(task / "labelsTr", tmp_path / "other")
    for number, file in enumerate(sorted(other.glob("*.nii.gz"))):
        file.rename(file.with_name(file.name.replace(".nii", "_pred.nii"))) if number else file.unlink()
    cases, _ = read_page(view(task, [other]))
    assert list(cases.values()) == [["reference"], *[["reference", "other"]] * 5, []]
    with pytest.raises(ConfigError, match=r"view\.html exists; choose another path, or use --overwrite to replace it"):
        view(task)
    with pytest.raises(DataError, match=r"other has no label map of .*, only of .*; name label maps CASE"):
        view(task / "imagesTs", [other], overwrite=True)
    with pytest.raises(ConfigError, match=r"is not a run and has no config, so --set data\.root=x does not apply"):
        view(task, overrides=["data.root=x"])


def test_an_image_and_its_label_maps(task, tmp_path):
    image, label = (sorted((task / folder).glob("*.nii.gz"))[0] for folder in ("imagesTr", "labelsTr"))
    stored = nibabel.load(label)
    voxels = np.where(np.asarray(stored.dataobj) > 0, 300, 0).astype(np.int16)
    own = nibabel.Nifti1Image(voxels, stored.affine)
    nibabel.save(own, tmp_path / "a.nii.gz")
    own.header.extensions.append(nibabel.nifti1.Nifti1Extension(LABEL_TABLE, format_label_table({300: "<liver>"})))
    nibabel.save(own, tmp_path / "b.nii.gz")
    assert read_page(view(image)) == ({image.name[:-7]: []}, [])
    for labels, title, names in (("a", "a", ["label 300"]), ("b", "b", ["<liver>"])):
        found = read_page(view(image, [tmp_path / f"{labels}.nii.gz"], output=tmp_path / f"{labels}.html"))
        assert found == ({image.name[:-7]: [title]}, names)
    with pytest.raises(DataError, match=r"a\.nii\.gz is the label map of one image, but 7 images are shown"):
        view(task, [tmp_path / "a.nii.gz"], overwrite=True)


def test_the_command_opens_the_page_unless_it_must_not(task, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setenv("DISPLAY", ":7")
    image = str(sorted((task / "imagesTr").glob("*.nii.gz"))[0])
    given = ["view", image, "-o", "page.html"]
    assert CliRunner().invoke(app, [*given, "--no-open"]).output == "page.html\n"
    assert opened == []
    assert CliRunner().invoke(app, [*given, "--overwrite"]).exit_code == 0
    assert opened == [(tmp_path / "page.html").as_uri()]
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert CliRunner().invoke(app, [*given, "--overwrite"]).exit_code == 0
    assert len(opened) == 1
