"""The real hippocampi: a network learns them, and a DICOM series gets a label map in its own geometry."""

import json

import nibabel
import numpy as np
import pytest
import yaml

from volseg.data.cases import folds
from volseg.data.layouts import load_task
from volseg.data.readers import read_volume
from volseg.experiment import load_config, predict, train

pytestmark = pytest.mark.real_data


@pytest.fixture(scope="module")
def outcome(msd_task04, tmp_path_factory):
    """Train a small U-Net on 40 cases of fold 0 for some 8 s; validate on 8 of the fold's others.

    Without augmentation, which 120 batches are too few to make up for: with it the Dice depends on the seed.
    """
    folder = tmp_path_factory.mktemp("real")
    fold = folds([case["case"] for case in load_task(msd_task04).training])[0]
    (folder / "splits.json").write_text(
        json.dumps([{"train": fold.training[:40], "val": fold.validation[:8]}]), encoding="utf-8"
    )
    config = {
        "name": "real",
        "output": str(folder / "run"),
        "data": {"root": str(msd_task04)},
        "split": {"file": str(folder / "splits.json")},
        "patch": {"size": [32, 48, 32], "batch": 2},
        "augmentation": {"enabled": False},
        "network": {"name": "UNet", "channels": [8, 16, 32], "strides": [2, 2], "num_res_units": 1},
        "optimizer": {"name": "AdamW", "lr": 0.005},
        "training": {"epochs": 1, "iterations": 120, "ema": 0.97},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return train(load_config(folder / "config.yaml"))


def test_a_small_network_learns_the_hippocampus(outcome):
    # About 0.80 here, for three seeds. Untrained it is 0.05; all of it called by one of its names gives the other 0.
    assert len(outcome.validated.summary["metric_per_case"]) == 8
    assert outcome.validated.scores["dice/Anterior"] > 0.7
    assert outcome.validated.scores["dice/Posterior"] > 0.7


def test_a_dicom_series_is_predicted_on_its_own_geometry(outcome, dicom_series, tmp_path):
    ((name, path),) = predict(outcome.folder, [dicom_series], tmp_path / "out").label_maps.items()
    assert path == tmp_path / "out" / f"{name}.nii.gz"
    written, series = nibabel.load(path), read_volume(dicom_series)
    assert written.shape == tuple(series.shape[1:])
    # NIfTI stores the affine as float32: 1e-4 mm at 200 mm from the origin.
    np.testing.assert_allclose(written.affine, series.affine.numpy(), atol=1e-4)
    assert set(np.unique(written.dataobj)) == {0, 1, 2}
