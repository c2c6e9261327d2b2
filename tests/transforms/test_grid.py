import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.data import MetaTensor
from scipy.spatial.transform import Rotation

from volseg.errors import GridError
from volseg.transforms.grid import Grid, depends_on_case, spacing_after
from volseg.transforms.preprocessing import build_preprocessing


def grid(shape=(4, 5, 6), affine=None) -> Grid:
    affine = torch.eye(4, dtype=torch.float64) if affine is None else affine
    return Grid.of(MetaTensor(torch.zeros(1, *shape), affine=affine))


def shifted(by: float) -> torch.Tensor:
    affine = torch.eye(4, dtype=torch.float64)
    affine[0, 3] = by
    return affine


def test_grids_are_apart_as_their_farthest_corners_and_map_to_the_same_place():
    stretched = torch.diag(torch.tensor([1.0, 1.0, 1.1, 1.0], dtype=torch.float64))
    # Five steps of 0.1 mm lie between the first and the last voxel of six.
    assert grid().distance(grid(affine=stretched)) == pytest.approx(0.5)
    assert grid().distance(grid(shape=(4, 5, 7))) == float("inf")
    here, there = grid(affine=shifted(1)), grid(affine=2 * shifted(3))
    index = torch.tensor([1.0, 2.0, 3.0, 1.0], dtype=torch.float64)
    assert torch.allclose(here.affine @ index, there.affine @ (here.index_map(there) @ index))


def test_rounded_affines_are_one_grid_and_half_a_voxel_is_not():
    grid().require_same(grid(affine=shifted(0.05)), "image", "label")
    with pytest.raises(GridError, match=r"^label is up to 0.5 mm away from its image \(allowed: 0.1 mm, 0.1 voxel\)"):
        grid().require_same(grid(affine=shifted(0.5)), "image", "label")
    with pytest.raises(GridError, match=r"^label has the shape \(4, 5, 7\), but its image has \(4, 5, 6\); resample"):
        grid().require_same(grid(shape=(4, 5, 7)), "image", "label")


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_affine_that_places_nothing_is_refused(value):
    affine = torch.eye(4, dtype=torch.float64)
    affine[1, 1] = value
    with pytest.raises(GridError, match="finite, invertible 4 x 4 affine"):
        grid(affine=affine)


SIDES = st.tuples(*[st.sampled_from([0.7, 1.0, 1.6, 3.1])] * 3)
STEPS = st.lists(
    st.one_of(
        st.builds(lambda codes: {"name": "Orientation", "axcodes": codes}, st.sampled_from(["RAS", "SPL", "AIR"])),
        st.builds(lambda sides: {"name": "Spacing", "spacing": list(sides)}, SIDES),
        st.sampled_from([{"name": "ZScore"}, {"name": "CropForeground", "margin": 1}, {"name": "Pad", "multiple": 4}]),
    ),
    max_size=4,
).filter(lambda steps: "Pad" not in [step["name"] for step in steps[:-1]])


@given(steps=STEPS, sides=SIDES, order=st.permutations(range(3)), angles=st.tuples(*[st.floats(-20, 20)] * 3))
def test_sides_are_those_of_the_preprocessed_volume(steps, sides, order, angles):
    affine = np.eye(4)
    turn = Rotation.from_euler("xyz", angles, degrees=True).as_matrix()[:, order] * (1, -1, 1)
    affine[:3, :3] = turn * sides
    voxels = torch.rand(1, 5, 6, 7, generator=torch.Generator().manual_seed(0)) + 1
    case = {"image": MetaTensor(voxels, affine=torch.from_numpy(affine))}
    prepared = build_preprocessing(steps, ["image"])(case)["image"]
    expected = prepared.affine[:3, :3].norm(dim=0).numpy()
    np.testing.assert_allclose(spacing_after(steps, affine), expected, rtol=1e-6)  # angles of affines: float64
    names = [step["name"] for step in steps if step["name"] in ("Orientation", "Spacing")]
    assert depends_on_case(steps) == (names[-1:] != ["Spacing"] if "Spacing" in names else True)
    if not depends_on_case(steps):
        np.testing.assert_allclose(spacing_after(steps, np.eye(4)), expected, rtol=1e-6)
