"""A CT on other grids, by a network that need not be trained to be told apart from a wrong way."""

import sys
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool3d

from volseg.data.readers import read_volume
from volseg.inference.original_grid import label_map_on
from volseg.inference.predictor import Predictor
from volseg.models import build_network
from volseg.transforms.grid import Grid
from volseg.transforms.preprocessing import build_preprocessing

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

from turned_ct import AIR, MARGIN_MM, RESAMPLED, bring, lie_inside, list_orders, place_grid, predict, reorder, save

TRAINED = SimpleNamespace(
    preprocessing=build_preprocessing(
        [
            {"name": "Orientation"},
            {"name": "Spacing", "spacing": [3, 3, 3]},
            {"name": "ClipZScore", "lower": -200, "upper": 300, "mean": 0, "std": 100},
        ]
    )
)


def tell_body(images):
    """Return logits of air and body, of means over 3 x 3 x 3 voxels: smooth, as what networks find is."""
    body = avg_pool3d(images, 3, stride=1, padding=1, count_include_pad=False) + 1.5  # between air and fat
    return torch.cat([-body, body], 1)


@pytest.fixture
def ct(shared_ct, tmp_path):
    path = tmp_path / "ct.nii.gz"
    nibabel.save(nibabel.load(shared_ct / "slab_3mm.nii.gz").slicer[40:90, 10:60], path)
    return path


@pytest.mark.real_data
def test_another_order_of_the_axes_gives_the_same_label_at_every_place(ct):
    network = build_network(
        {"name": "UNet", "channels": [4, 8], "strides": [2], "num_res_units": 1}, in_channels=1, out_channels=3
    ).eval()
    predictor = Predictor(model=network, num_classes=3, window=(48, 48, 24))
    labels = nibabel.load(predict(TRAINED, predictor, ct))
    assert len(np.unique(np.asarray(labels.dataobj))) > 1
    assert len({str(way) for way in list_orders(47)}) == 47
    for number, (order, flips) in enumerate(list_orders(3)):
        path = ct.with_name(f"order_{number}.nii.gz")
        nibabel.save(reorder(nibabel.load(ct), order, flips), path)
        found, expected = nibabel.load(predict(TRAINED, predictor, path)), reorder(labels, order, flips)
        np.testing.assert_array_equal(np.asarray(found.dataobj), np.asarray(expected.dataobj))
        np.testing.assert_array_equal(found.affine, expected.affine)


@pytest.mark.real_data
@pytest.mark.parametrize("title", list(RESAMPLED)[2:])
def test_on_another_grid_the_same_body_is_found(ct, title):
    predictor = Predictor(model=tell_body, num_classes=2)
    image = read_volume(ct)
    target = place_grid(Grid.of(image), *RESAMPLED[title])
    path = save(bring(target, image.as_tensor(), Grid.of(image)), target, ct.with_name("there.nii.gz"))
    found = read_volume(predict(TRAINED, predictor, path))[0] > 0
    case = TRAINED.preprocessing({"image": image})
    probabilities = predictor.probabilities(case["image"].as_tensor()[None])[0]
    expected = label_map_on(target, probabilities, Grid.of(case["image"]))[0] > 0
    inside = lie_inside(target, Grid.of(image), MARGIN_MM)
    found, expected = found & inside, expected & inside
    assert inside.float().mean() > 0.2
    dice = 2 * (found & expected).sum() / (found.sum() + expected.sum())
    assert dice > 0.99
    assert AIR < -1000
