"""Files to read, each with one correct or faulty property."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest

AFFINE = np.array([[0.0, 0.8, 0.0, -10.0], [-0.9, 0.0, 0.0, 20.0], [0.0, 0.0, 2.5, 5.0], [0.0, 0.0, 0.0, 1.0]])


@pytest.fixture
def affine() -> np.ndarray:
    """Return an affine with three spacings, swapped axes and a flip."""
    return AFFINE.copy()


@pytest.fixture
def save(tmp_path):
    """Return a function that writes a NIfTI file and returns its path."""

    def write(voxels, name="volume.nii.gz", affine=AFFINE, image=nibabel.Nifti1Image) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(image(voxels, affine), path)
        return path

    return write


@pytest.fixture
def ramp() -> np.ndarray:
    """Return voxels that are all different, so that no permutation passes for another."""
    return np.arange(3 * 4 * 5, dtype=np.int16).reshape(3, 4, 5)


@pytest.fixture
def msd(tmp_path):
    """Return a function that writes a task folder whose dataset.json has the given changes, and empty files."""

    def write(folder="Task11_Test", *, files=True, **changes) -> Path:
        root = tmp_path / folder
        declared = {
            "name": "Test",
            "modality": {"0": "MRI"},
            "labels": {"0": "background", "1": "Anterior", "2": "Posterior"},
            "numTraining": 2,
            "numTest": 1,
            "training": [
                {"image": f"./imagesTr/case_{n}.nii.gz", "label": f"./labelsTr/case_{n}.nii.gz"} for n in ("b", "a")
            ],
            "test": ["./imagesTs/case_c.nii.gz"],
        }
        declared = {key: value for key, value in (declared | changes).items() if value is not ...}
        root.mkdir(parents=True, exist_ok=True)
        (root / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
        if files:
            for name in ("imagesTr/case_a", "imagesTr/case_b", "labelsTr/case_a", "labelsTr/case_b", "imagesTs/case_c"):
                path = root / f"{name}.nii.gz"
                path.parent.mkdir(exist_ok=True)
                path.touch()
        return root

    return write
