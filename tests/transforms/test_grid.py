import pytest
import torch
from monai.data import MetaTensor

from volseg.errors import GridError
from volseg.transforms.grid import Grid


def grid(shape=(4, 5, 6), affine=None) -> Grid:
    affine = torch.eye(4, dtype=torch.float64) if affine is None else affine
    return Grid.of(MetaTensor(torch.zeros(1, *shape), affine=affine))


def shifted(by: float) -> torch.Tensor:
    affine = torch.eye(4, dtype=torch.float64)
    affine[0, 3] = by
    return affine


def test_distance_is_that_of_the_farthest_corner():
    stretched = torch.diag(torch.tensor([1.0, 1.0, 1.1, 1.0], dtype=torch.float64))
    # Five steps of 0.1 mm lie between the first and the last voxel of six.
    assert grid().distance(grid(affine=stretched)) == pytest.approx(0.5)
    assert grid().distance(grid(shape=(4, 5, 7))) == float("inf")


def test_original_grid_is_the_one_that_the_meta_remembers():
    volume = MetaTensor(torch.zeros(1, 2, 2, 2), affine=shifted(9))
    assert Grid.original(volume).shape == (2, 2, 2)
    volume.meta |= {"spatial_shape": (7, 8, 9), "original_affine": shifted(3)}
    original = Grid.original(volume)
    assert original.shape == (7, 8, 9)
    assert original.affine.equal(shifted(3))


def test_index_map_leads_to_the_same_place():
    here, there = grid(affine=shifted(1)), grid(affine=2 * shifted(3))
    index = torch.tensor([1.0, 2.0, 3.0, 1.0], dtype=torch.float64)
    assert torch.allclose(here.affine @ index, there.affine @ (here.index_map(there) @ index))


def test_rounded_affines_are_one_grid_and_half_a_voxel_is_not():
    grid().require_same(grid(affine=shifted(0.05)), "image", "label")
    with pytest.raises(GridError, match=r"^label lies up to 0.5 mm away from its image \(at most 0.1 mm, 0.1 voxel\)"):
        grid().require_same(grid(affine=shifted(0.5)), "image", "label")
    with pytest.raises(GridError, match=r"^label has the shape \(4, 5, 7\), but its image has \(4, 5, 6\); resample"):
        grid().require_same(grid(shape=(4, 5, 7)), "image", "label")


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_affine_that_places_nothing_is_refused(value):
    affine = torch.eye(4, dtype=torch.float64)
    affine[1, 1] = value
    with pytest.raises(GridError, match="finite, invertible 4 x 4 affine"):
        grid(affine=affine)
