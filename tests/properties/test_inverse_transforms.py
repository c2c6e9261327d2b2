"""Whatever preprocessing did to the grid, a prediction lands on the grid of the file."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from label_maps import original_label_map
from monai.data import MetaTensor
from volume_files import CODES, tilt, turn

from volseg.inference.original_grid import resample
from volseg.inference.predictor import Predictor
from volseg.transforms.grid import Grid
from volseg.transforms.preprocessing import build_preprocessing

few = settings(max_examples=15)
sides = st.tuples(*[st.integers(6, 15)] * 3)
shift = st.tuples(*[st.floats(-200, 200)] * 3)


def affine_of(axes: str, spacing, origin, degrees: float = 0.0) -> torch.Tensor:
    """Return the affine of voxel axes that point to ``axes``, tilted about the first world axis."""
    affine = turn(axes, spacing, tilt(degrees, 0, 0))
    affine[:3, 3] = origin
    return torch.from_numpy(affine)


def ball(grid: Grid, radius: float = 0.35) -> torch.Tensor:
    """Return an ellipsoid that fills ``radius`` of every side, as a label map ``(1, D, H, W)``."""
    axes = [(torch.arange(n) - (n - 1) / 2) / n for n in grid.shape]
    i, j, k = torch.meshgrid(*axes, indexing="ij")
    return (i**2 + j**2 + k**2 < radius**2)[None].float()


def make_case(shape, affine) -> dict:
    label = ball(Grid(shape, affine))
    image = MetaTensor(label * 50 + torch.rand(1, *shape) + 1, affine=affine)
    return {"case": "drawn", "image": image, "label": MetaTensor(label, affine=affine)}


def one_hot(label: torch.Tensor) -> torch.Tensor:
    return torch.cat([1 - label.float(), label.float()])


@few
@given(
    shape=sides,
    axes=st.sampled_from(CODES),
    target=st.sampled_from(CODES),
    origin=shift,
    degrees=st.sampled_from([0.0, 17.0]),
    margin=st.integers(0, 2),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_without_resampling_the_inverse_is_exact(shape, axes, target, origin, degrees, margin, multiple):
    affine = affine_of(axes, (1, 1, 1), origin, degrees)
    case = make_case(shape, affine)
    steps = [
        {"name": "Orientation", "axcodes": target},
        {"name": "Spacing", "spacing": [1, 1, 1]},
        {"name": "CropForeground", "above": 10, "margin": margin},
        {"name": "Pad", "multiple": multiple},
    ]
    done = build_preprocessing(steps)(case)
    restored = original_label_map(one_hot(done["label"].as_tensor()), done["image"])
    assert restored.affine.equal(affine)
    assert restored.as_tensor().equal(case["label"].as_tensor().to(torch.uint8))  # outside the crop is background


@few
@given(
    shape=st.tuples(*[st.integers(14, 22)] * 3),
    axes=st.sampled_from(CODES),
    spacing=st.tuples(*[st.floats(0.8, 1.6)] * 3),
    origin=shift,
    degrees=st.sampled_from([0.0, 17.0]),
    crop=st.booleans(),
)
def test_through_another_spacing_a_label_comes_back(shape, axes, spacing, origin, degrees, crop):
    original = Grid(shape, affine_of(axes, spacing, origin, degrees))
    case = make_case(shape, original.affine)
    steps = [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1, 1, 1]}, {"name": "Pad", "multiple": 8}]
    steps[1:1] = [{"name": "CropForeground", "above": 10, "margin": 2}] if crop else []
    done = build_preprocessing(steps)(case)

    # A probability that is smooth in the patient decides the label of every original voxel as its own value there.
    radius = 0.3 * min(side * length for side, length in zip(shape, spacing, strict=True))
    inside = sphere(Grid.of(done["image"]), original, radius) / 100
    labels = original_label_map(torch.stack([0.5 - inside, 0.5 + inside]), done["image"]).as_tensor()
    depth = sphere(original, original, radius)
    # Trilinear error: at most 3/8 mm**2 times the curvature, below 1 / (radius - 1) mm around the surface.
    sure = depth.abs() > 3 / 8 / (radius - 1)
    assert labels[0][sure].bool().equal(depth[sure] > 0)


def sphere(grid: Grid, around: Grid, radius: float) -> torch.Tensor:
    """Return how deep (mm) each voxel of ``grid`` lies inside a sphere in the middle of ``around``."""
    indices = torch.stack(torch.meshgrid(*(torch.arange(n) for n in grid.shape), indexing="ij")).double()
    places = torch.einsum("ab,bdhw->adhw", grid.affine[:3, :3], indices) + grid.affine[:3, 3, None, None, None]
    middle = around.affine @ torch.tensor([*((n - 1) / 2 for n in around.shape), 1], dtype=torch.float64)
    return (radius - (places - middle[:3, None, None, None]).norm(dim=0)).float()


@few
@given(shape=sides, axes=st.sampled_from(CODES), spacing=st.tuples(*[st.floats(0.5, 2.0)] * 3), origin=shift)
def test_a_place_in_the_patient_keeps_its_value(shape, axes, spacing, origin):
    affine = affine_of(axes, spacing, origin, 11.0)
    source = Grid(shape, affine)
    indices = torch.stack(torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")).double().flatten(1)
    places = (affine[:3, :3] @ indices + affine[:3, 3:]).reshape(3, *shape)
    target = Grid((5, 4, 3), affine @ affine_of("RAS", (0.7, 0.9, 0.8), (1.2, 1.1, 1.3)))
    values = resample(target, places.float(), source)
    wanted = torch.stack(torch.meshgrid(*(torch.arange(n) for n in target.shape), indexing="ij"))
    wanted = (target.affine[:3, :3] @ wanted.double().flatten(1) + target.affine[:3, 3:]).reshape(3, *target.shape)
    # Positions of up to 250 mm in float32 (2e-5 mm each), of which eight are averaged.
    torch.testing.assert_close(values, wanted.float(), atol=2e-4, rtol=0)


@few
@given(shape=sides, axes=st.sampled_from(CODES), window=st.tuples(*[st.integers(4, 20)] * 3), mirror=st.booleans())
def test_prediction_of_an_identity_model_is_the_image(shape, axes, window, mirror):
    affine = affine_of(axes, (1, 1, 1), (3, -4, 5))
    case = make_case(shape, affine)
    done = build_preprocessing([{"name": "Orientation"}])(case)
    labels = Predictor(
        model=lambda images: torch.cat([20 - images, images - 20], 1), num_classes=2, window=window, mirror=mirror
    )(done)
    assert labels.affine.equal(affine)
    assert labels.as_tensor().equal(case["label"].as_tensor().to(torch.uint8))
