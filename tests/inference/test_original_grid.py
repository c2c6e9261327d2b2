import pytest
import torch
from label_maps import label_map_on, original_label_map
from monai.data import MetaTensor

from volseg.errors import GridError
from volseg.inference.original_grid import resample
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


def test_probabilities_must_lie_on_their_grid():
    with pytest.raises(GridError, match=r"\(2, 4, 4, 5\) does not lie on a grid of \(4, 4, 4\) voxels"):
        label_map_on(grid((4, 4, 4)), torch.zeros(2, 4, 4, 5), grid((4, 4, 4)))


def test_more_classes_than_a_byte_holds_are_refused():
    with pytest.raises(GridError, match="holds 256 labels, the model has 257"):
        label_map_on(grid((1, 1, 1)), torch.zeros(257, 1, 1, 1), grid((1, 1, 1)))
