"""The voxel sides that are foretold are those that the preprocessing comes to."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.data import MetaTensor
from scipy.spatial.transform import Rotation

from volseg.transforms.preprocessing import build_preprocessing
from volseg.transforms.spacing import depends_on_case, spacing_after

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
    if not depends_on_case(steps):
        np.testing.assert_allclose(spacing_after(steps, np.eye(4)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("names", "depends"),
    [
        ([], True),
        (["Orientation"], True),
        (["Spacing"], False),
        (["Orientation", "Spacing", "ZScore"], False),
        (["Spacing", "Orientation"], True),
        (["Orientation", "Spacing", "Orientation"], True),
    ],
)
def test_cases_have_one_spacing_when_resampled_last(names, depends):
    assert depends_on_case([{"name": name, "spacing": [1, 1, 2]} for name in names]) is depends
