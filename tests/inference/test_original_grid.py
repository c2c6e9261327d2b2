"""Label maps on the image's own grid contain the files' values, for classes or for painted regions."""

import nibabel
import numpy as np
import pytest
import torch
from label_maps import label_map_on, original_label_map
from monai.data import MetaTensor

from volseg.errors import GridError
from volseg.inference.original_grid import resample
from volseg.inference.predictor import Predictor
from volseg.inference.writing import write_prediction
from volseg.transforms.grid import Grid
from volseg.transforms.preprocessing import build_preprocessing


def grid(shape, *, spacing=(1, 1, 1), origin=(0, 0, 0)) -> Grid:
    affine = torch.diag(torch.tensor([*spacing, 1], dtype=torch.float64))
    affine[:3, 3] = torch.tensor(origin)
    return Grid(shape, affine)


def test_probabilities_are_interpolated_before_the_label_is_decided():
    # Along W, label 1 has the probabilities 0.1 and 0.8; halfway between them 0.45, which is background.
    probabilities = torch.tensor([[0.9, 0.2], [0.1, 0.8]]).reshape(2, 1, 1, 2)
    fine = grid((1, 1, 3), spacing=(1, 1, 0.5))
    assert label_map_on(fine, probabilities, grid((1, 1, 2))).flatten().tolist() == [0, 0, 1]


def test_what_the_network_finds_in_the_padding_is_not_taken_for_what_a_crop_removed():
    image = torch.zeros(1, 10, 10, 10)
    image[0, 3:6, 3:6, 3:6] = 1
    steps = [{"name": "CropForeground"}, {"name": "Pad", "multiple": 8}]
    done = build_preprocessing(steps)({"case": "x", "image": MetaTensor(image)})["image"]
    everywhere = torch.zeros(2, 8, 8, 8)
    everywhere[1] = 1
    assert original_label_map(everywhere, done).as_tensor().equal(image.to(torch.uint8))


def test_edge_voxels_reach_half_their_side():
    probabilities = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 2, 2, 2)
    coarse = grid((2, 2, 2), spacing=(3, 3, 3), origin=(1, 1, 1))  # covers -0.5 to 5.5 mm
    labels = label_map_on(grid((9, 9, 9), origin=(-1, -1, -1)), probabilities, coarse)
    assert labels.sum() == 6**3
    assert (labels[0, 1:7, 1:7, 1:7] == 1).all()


@pytest.mark.parametrize("spacing", [(1, 1, 1), (0.7, 1.3, 0.9)])
@pytest.mark.parametrize("regions", [False, True])
def test_slabs_change_nothing(monkeypatch, spacing, regions):
    probabilities, rule = torch.rand(3, 7, 6, 5), {"values": (0, 7, 500), "regions": regions}
    source, target = grid((7, 6, 5), spacing=spacing), grid((8, 5, 4), origin=(-1, 0, 0))
    whole = label_map_on(target, probabilities, source, **rule)
    assert set(whole.unique().tolist()) == {0, 7, 500}
    assert not whole[0, 0].any()  # outside of the source
    monkeypatch.setattr("volseg.inference.original_grid.SLAB_ELEMENTS", 1)  # one slab per voxel
    assert label_map_on(target, probabilities, source, **rule).equal(whole)


def test_one_slice_can_be_resampled():
    volume = torch.rand(2, 1, 5, 5)
    same = resample(grid((3, 5, 5), spacing=(0.2, 1, 1), origin=(-0.2, 0, 0)), volume, grid((1, 5, 5)))
    torch.testing.assert_close(same, volume.expand(2, 3, 5, 5))  # no neighbour along D: the slice is continued


def test_a_grid_rounded_by_its_file_format_needs_no_interpolation():
    volume = torch.rand(1, 40, 40, 40)
    rounded = grid((40, 40, 40), spacing=(1.0001, 1, 1), origin=(1e-5, 0, 0))
    assert resample(rounded, volume, grid((40, 40, 40))).equal(volume)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (torch.zeros(2, 4, 4, 5), r"\(2, 4, 4, 5\) is not on a grid of \(4, 4, 4\) voxels"),
        (torch.zeros(257, 4, 4, 4), "more than 256 classes need values, got 257"),
    ],
)
def test_other_probabilities_are_refused(probabilities, message):
    with pytest.raises(GridError, match=message):
        label_map_on(grid((4, 4, 4)), probabilities, grid((4, 4, 4)))


def make_image(size=(4, 5, 6)):
    return MetaTensor(
        torch.randn(1, *size),
        affine=torch.eye(4, dtype=torch.float64),
        meta={"original_affine": torch.eye(4, dtype=torch.float64), "spatial_shape": size},
    )


def by_hand(probabilities, values):
    """nnU-Net 2.8.1's ``convert_probabilities_to_segmentation`` with regions."""
    painted = np.zeros(probabilities.shape[1:], dtype=np.uint16)
    for index, value in enumerate(values):
        painted[probabilities[index].numpy() > 0.5] = value
    return painted


@pytest.mark.parametrize("values", [(2, 1, 4), (1, 300, 14175), (1, 1, 2)])
@pytest.mark.parametrize(("window", "mirror"), [(None, False), ((4, 4, 4), True)])
def test_sigmoids_of_regions_are_painted_in_their_order(window, mirror, values):
    """A network without neighbourhood: windows and mirrorings change nothing. Regions may be certain at once."""
    image = make_image()
    scale = torch.tensor([4.0, -3.0, 1.0]).view(1, 3, 1, 1, 1)
    predictor = Predictor(
        model=lambda x: scale * x, num_classes=3, values=values, regions=True, window=window, mirror=mirror
    )
    expected = (scale * image.as_tensor()).sigmoid()[0]
    torch.testing.assert_close(predictor.probabilities(image.as_tensor()[None])[0], expected)
    painted = predictor({"case": "a", "image": image})
    assert painted.dtype == (torch.uint8 if max(values) < 256 else torch.int32)
    assert np.array_equal(painted[0].numpy(), by_hand(expected, values))


@pytest.mark.parametrize("values", [(0, 7, 500), (2, 1, 4)])
def test_classes_become_their_values(values):
    probabilities, image = torch.rand(3, 4, 5, 6), make_image()
    labels = original_label_map(probabilities, image, values=values)
    assert labels.dtype == (torch.uint8 if max(values) < 256 else torch.int32)
    assert torch.equal(torch.tensor(values)[probabilities.argmax(0)], labels[0].as_tensor().long())


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, np.int32)]
)
def test_the_largest_value_chooses_the_type_of_the_file(largest, dtype, tmp_path):
    image = make_image()
    label_map = torch.zeros(1, 4, 5, 6, dtype=torch.int32)
    label_map[0, 1, 2, 3] = largest
    written = nibabel.load(write_prediction(label_map, image, tmp_path / "a.nii.gz"))
    assert written.get_data_dtype() == dtype
    assert np.array_equal(np.asarray(written.dataobj), label_map[0].numpy())
