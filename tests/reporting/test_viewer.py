"""The page of `volseg view` in a real browser: values, names, cases, labels, and no requests."""

import re
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from volseg.errors import ConfigError, DataError
from volseg.reporting import viewer
from volseg.reporting.viewer import ViewedCase, write_viewer

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "site"))

from headless_browser import Browser, find_chromium

ROOT = Path(__file__).parents[2]
AFFINE = np.array([[0, -1.5, 0, 40], [2.0, 0, 0, -30], [0, 0, 3.0, 5], [0, 0, 0, 1]])
"""Axes in another order than the patient's, one of them reversed."""
NAMES = {1: "Anterior", 4: '</script><img src="http://example.org/x.png">'}
PLACE = re.compile(r"\((.+)\) mm, value (\S+?)(?:: (.+))?$")
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
HARMLESS = "GPU stall due to ReadPixels"
"""What the browser's drawing on the CPU says now and then."""


@pytest.fixture(scope="module")
def script():
    """Let pages have NiiVue, fetched as `make viewer` does where it was not."""
    if find_chromium() is None:
        pytest.skip("needs a browser (Debian: apt install chromium)")
    if not viewer.SCRIPT.is_file():
        made = subprocess.run(["make", "viewer"], cwd=ROOT, capture_output=True, encoding="utf-8")
        assert "FAILED" not in made.stdout + made.stderr, "NiiVue has another SHA-512 than the Makefile"
        if made.returncode:
            pytest.skip("needs NiiVue, which npm fetches (Debian: apt install npm; make viewer)")


@pytest.fixture(scope="module")
def volumes():
    """Return label maps, and an image whose values are positions."""
    image = np.arange(12 * 16 * 10, dtype=np.float32).reshape(12, 16, 10) / 4
    reference, prediction = np.zeros((2, 12, 16, 10), dtype=np.uint8)
    reference[2:8, 4:12, 2:8], reference[2:5, 4:12, 2:8] = 1, 4
    prediction[3:10, 4:12, 2:8] = 1
    return {"image": image, "reference": reference, "prediction": prediction}


@pytest.fixture(scope="module")
def cases(volumes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes")
    files = {name: folder / f"{name}.nii.gz" for name in volumes}
    for name, voxels in volumes.items():
        nibabel.save(nibabel.Nifti1Image(voxels, AFFINE), files[name])
    layers = {name: files[name] for name in ("reference", "prediction")}
    return [
        ViewedCase(name="first", image=files["image"], layers=layers, dice=0.8),
        ViewedCase(name="second", image=files["image"]),
    ]


@pytest.fixture(scope="module")
def tab(script, cases, tmp_path_factory):
    page = write_viewer(cases, tmp_path_factory.mktemp("page") / "view.html", title="<b>a run</b>", names=NAMES)
    with Browser() as browser:
        tab = browser.open(page.as_uri(), width=1000, height=700)
        tab.page = page
        tab.wait_for("document.body.dataset.shown === 'first (Dice 0.800)'")
        yield tab


def read_places(tab):
    """Return each panel's text about the crosshair: voxel, value, label."""
    said = tab.evaluate("panels.filter((one) => !one.figure.hidden).map((one) => one.output.textContent)")
    places = [PLACE.match(text).groups() for text in said]
    voxels = [np.linalg.inv(AFFINE) @ [*map(float, position.split(", ")), 1] for position, _, _ in places]
    return [
        (tuple(np.rint(at[:3]).astype(int)), float(value), name)
        for at, (_, value, name) in zip(voxels, places, strict=True)
    ]


def count_coloured(tab, tmp_path):
    """Return how many pixels of the panels are clearly no grey: labels', for the crosshair is thin."""
    tab.evaluate(DRAWN)
    top = tab.evaluate("document.querySelector('canvas').getBoundingClientRect().top")
    seen = np.asarray(Image.open(tab.photograph(tmp_path / "seen.png")).convert("RGB"))[int(top) :].astype(int)
    return int((np.ptp(seen, axis=-1) > 40).sum())


def test_the_page_shows_what_the_files_hold(tab, volumes):
    names = {0: "background", **NAMES}
    assert tab.evaluate("panels.map((one) => one.title.textContent)") == ["reference", "prediction"]
    centre = {voxel for voxel, _, _ in read_places(tab)}
    assert all(volumes["reference"][voxel] for voxel in centre)
    box = "document.querySelectorAll('canvas')[{}].getBoundingClientRect()"
    met = set()
    for panel in (0, 1):
        left, top = (tab.evaluate(f"{box.format(panel)}.{side}") for side in ("left", "top"))
        for x, y in ((30, 60), (60, 90), (80, 70), (100, 100), (55, 130)):
            tab.click(left + x, top + y)
            tab.evaluate(DRAWN)
            (voxel, value, reference), (other, _, prediction) = read_places(tab)
            assert voxel == other  # one crosshair in both panels
            assert value == pytest.approx(volumes["image"][voxel])
            assert reference == names[volumes["reference"][voxel]]
            assert prediction == names[volumes["prediction"][voxel]]
            met.add((voxel, reference))
    assert len(met) >= 8
    assert len({reference for _, reference in met}) >= 2


def test_labels_are_switched_off_and_on(tab, tmp_path):
    assert tab.evaluate("[...document.querySelectorAll('#labels label')].map((one) => one.textContent)") == [
        *NAMES.values()
    ]
    both = count_coloured(tab, tmp_path)
    press = "document.querySelectorAll('#labels input')[{}].click()"
    tab.evaluate(press.format(0))
    one = count_coloured(tab, tmp_path)
    tab.evaluate(press.format(1))
    none = count_coloured(tab, tmp_path)
    assert both > one + 1000 > none + 2000
    assert none < 0.2 * both
    for number in (0, 1):
        tab.evaluate(press.format(number))
    assert count_coloured(tab, tmp_path) == both


def test_another_case_is_chosen(tab, volumes):
    choose = "(() => {{ chooser.value = {}; chooser.dispatchEvent(new Event('change')); return showing; }})()"
    assert tab.evaluate("[...chooser.options].map((one) => one.textContent)") == ["first (Dice 0.800)", "second"]
    tab.evaluate(choose.format(1))
    tab.wait_for("document.body.dataset.shown === 'second'")
    ((voxel, value, name),) = read_places(tab)
    assert value == pytest.approx(volumes["image"][voxel])
    assert name is None
    tab.evaluate(choose.format(0))
    tab.wait_for("document.body.dataset.shown === 'first (Dice 0.800)'")
    assert len(read_places(tab)) == 2


def test_nothing_is_asked_and_nothing_is_wrong(tab):
    """After all tests before; names that look like markup are only shown."""
    assert tab.list_requests() == [tab.page.as_uri()]
    assert [said for said in tab.list_complaints() if HARMLESS not in said] == []
    assert tab.evaluate("document.images.length") == 0
    assert tab.evaluate("document.querySelector('h1').textContent") == "<b>a run</b>"
    assert "BSD 2-Clause License" in tab.page.read_text(encoding="utf-8")


def test_many_labels_leave_the_background_as_it_is(script, cases, volumes, tmp_path):
    """Of more than 64, NiiVue would tint the background in the first one's colour."""
    names = {value: f"organ {value}" for value in range(1, 120)}
    nibabel.save(nibabel.Nifti1Image(volumes["prediction"] * 100, AFFINE), tmp_path / "a.nii.gz")
    case = ViewedCase(name="a", image=cases[0].image, layers={"reference": tmp_path / "a.nii.gz"})
    with Browser() as browser:
        page = write_viewer([case], tmp_path / "view.html", title="many", names=names)
        tab = browser.open(page.as_uri(), width=1000, height=700)
        tab.wait_for("document.body.dataset.shown")
        tab.evaluate("opacity.value = 1")
        tab.evaluate("document.querySelectorAll('#labels input').forEach((one) => one.click())")
        assert count_coloured(tab, tmp_path) < 5000  # the crosshairs


def test_a_large_volume_is_thinned_and_the_page_says_so(cases, tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "read_niivue", lambda: "")
    monkeypatch.setattr(viewer, "MOST_OF_PAGE", 1000)
    with pytest.raises(ConfigError, match=r"can hold 1,000 voxels, .*first has 1,920\); choose fewer by --case"):
        write_viewer(cases, tmp_path / "view.html", title="", names=NAMES)
    assert not (tmp_path / "view.html").exists()
    monkeypatch.setattr(viewer, "FEWEST", 100)
    text = write_viewer(cases, tmp_path / "view.html", title="", names=NAMES).read_text(encoding="utf-8")
    # 500 voxels for each case: every second along the axes of 2 and 1.5 mm.
    assert "Thinned to 4 x 3 x 3 mm; the file has 12 x 16 x 10 voxels of 2 x 1.5 x 3 mm." in text


def test_label_maps_that_do_not_fit_are_refused(cases, tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "read_niivue", lambda: "")

    def attempt(voxels, affine=AFFINE, **settings):
        nibabel.save(nibabel.Nifti1Image(voxels, affine), tmp_path / "a.nii.gz")
        case = ViewedCase(name="a", image=cases[0].image, layers={"reference": tmp_path / "a.nii.gz"})
        write_viewer([case], tmp_path / "view.html", title="", names={}, **settings)

    with pytest.raises(DataError, match=r"has the shape \(2, 2, 2\), but its image has \(12, 16, 10\)"):
        attempt(np.ones((2, 2, 2), dtype=np.uint8))
    with pytest.raises(DataError, match=r"a\.nii\.gz has 0\.5 to 0\.5, not whole numbers from 0 to 16777215"):
        attempt(np.full((12, 16, 10), 0.5, dtype=np.float32))
    with pytest.raises(ConfigError, match=r"image\.nii\.gz has 1 channel\(s\) \(0-based\), got 2"):
        attempt(np.ones((12, 16, 10), dtype=np.uint8), channel=2)


def test_without_niivue_it_is_told_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "SCRIPT", tmp_path / "niivue.js")
    with pytest.raises(ConfigError, match=r"niivue\.js is missing\. .*run make viewer once \(needs npm"):
        viewer.read_niivue()
