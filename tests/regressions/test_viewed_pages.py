"""What `volseg view` did to files and to single voxels."""

import base64
import gzip
import re

import nibabel
import numpy as np
import pytest

from volseg.errors import ConfigError
from volseg.experiment import view
from volseg.reporting import viewer


@pytest.fixture
def image(tmp_path, monkeypatch):
    """Return the file of an image with voxels that are not finite."""
    monkeypatch.setattr(viewer, "read_niivue", lambda: "")
    voxels = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    voxels[0, 0, :3] = np.inf, -np.inf, np.nan
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "scan.nii.gz")
    return tmp_path / "scan.nii.gz"


@pytest.mark.parametrize("name", ["scan.nii.gz", "pages"])
def test_a_page_replaces_no_image(image, tmp_path, name):
    """With the image itself for its output and `--overwrite`, the page took the image's place."""
    (tmp_path / "pages").mkdir()
    before = image.read_bytes()
    with pytest.raises(ConfigError, match=r"the page is HTML, and .* is named otherwise; name it such as view\.html"):
        view(image, output=tmp_path / name, overwrite=True)
    assert image.read_bytes() == before


def test_a_voxel_that_is_not_finite_does_not_make_the_rest_black(image, tmp_path):
    """An infinite voxel became 3.4e38, beside which every other one is black; and the page did not say so."""
    page = view(image, cases=["scan", "scan"], output=tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert text.count('"title": "scan"') == 1  # a case that is named twice is shown once
    assert "Values that are not finite are shown as 0." in text
    block = re.search(r'<script id="v0"[^>]*>(.*?)</script>', text)[1]
    shown = nibabel.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(block)))
    assert np.asarray(shown.dataobj).max() == 59
