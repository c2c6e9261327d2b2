"""A volume that has its orientation and spacing already comes back as MONAI leaves it, to the last bit of its trace."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor, set_track_meta
from monai.transforms import Orientationd, Spacingd
from nibabel.orientations import axcodes2ornt, inv_ornt_aff
from scipy.spatial.transform import Rotation

from volseg.transforms import bounded_spacing
from volseg.transforms.bounded_spacing import BoundedSpacing
from volseg.transforms.preprocessing import orientation, spacing

FIELDS = ("image", "label")
CODES = ["RAS", "LPS", "PIR", "SAL"]
TARGET = (1.0, 0.8, 2.5)
OFFSETS = [0.0, 1e-12, 1e-7, 9.999e-4, 1e-3, 1.0000001e-3, 2e-3, 0.3]
"""Of a side from its target: MONAI's tolerance is 0.001."""
SHEARS = [0.0, 1e-12, 1e-9, 1e-7, 3e-6, 1e-4, 1e-2, 0.7]
TILTS = [0.0, 1e-9, 0.5, 20.0, 44.9, 45.0]
DTYPES = [torch.float32, torch.float64, torch.int16, torch.uint8]


@st.composite
def affines(draw, shape, codes):
    """An affine near ``TARGET`` and an orientation: tilted, sheared, flipped, as a header of 32 or 64 bits holds it."""
    sides = [side + draw(st.sampled_from([1, -1])) * draw(st.sampled_from(OFFSETS)) for side in TARGET]
    axis = draw(st.sampled_from(["x", "y", "z", "xyz"]))
    angles = [draw(st.sampled_from(TILTS)) for _ in axis]
    tilt = Rotation.from_euler(axis, angles, degrees=True).as_matrix()
    sheared = np.eye(3)
    sheared[draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 0)]))] = draw(st.sampled_from(SHEARS))
    turned = inv_ornt_aff(axcodes2ornt(draw(st.sampled_from(codes))), shape)[:3, :3]
    affine = np.eye(4)
    affine[:3, :3] = tilt @ sheared @ turned * sides
    affine[:3, 3] = [draw(st.sampled_from([0.0, -0.0, -91.25, 1e4])) for _ in range(3)]
    return affine.astype(draw(st.sampled_from([np.float32, np.float64]))).astype(np.float64)


@st.composite
def cases(draw, codes=CODES):
    """An image, and mostly a label, as readers and steps hand them on; their places may differ by a rounding."""
    shape = tuple(draw(st.sampled_from([1, 2, 3, 5, 200])) for _ in range(3))
    shape = shape if shape.count(200) < 2 else (200, 3, 2)
    affine, case = draw(affines(shape, codes)), {"case": "one"}
    for field in FIELDS[: draw(st.sampled_from([2, 2, 1]))]:
        channels = draw(st.sampled_from([1, 3])) if field == "image" else 1
        voxels = torch.arange(channels * int(np.prod(shape))).remainder(200).view(channels, *shape)
        voxels = voxels.to(draw(st.sampled_from(DTYPES)))
        if draw(st.booleans()):
            voxels = voxels.transpose(1, 3).contiguous().transpose(1, 3)
        own = affine + (draw(st.sampled_from([0.0, 0.0, 1e-9, 1e-3])) if field == "label" else 0.0)
        meta = {"original_affine": torch.from_numpy(own), "spatial_shape": shape, "filename_or_obj": "a.nii.gz"}
        meta |= {"qform_affine": torch.eye(4).double(), "sform_code": 1} if draw(st.booleans()) else {}
        case[field] = MetaTensor(voxels, affine=torch.from_numpy(own.copy()), meta=meta)
        case[field].applied_operations = [{"class": "Before", "id": 1}] if draw(st.booleans()) else []
    return case


def describe(value):
    """Return everything that tells two values apart, the sign of a zero and the order of a dictionary among it."""
    if isinstance(value, MetaTensor):
        return ("volume", describe(value.as_tensor()), describe(dict(sorted(value.__dict__.items()))))
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().numpy().tobytes()
        return (type(value).__name__, value.dtype, tuple(value.shape), value.stride(), raw)
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return ("dict", [(str(key), describe(held)) for key, held in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [describe(held) for held in value])
    return (type(value).__name__, repr(value))


def assert_as_monai(parent, step, case):
    """Compare with the parent's own way, by the same step, so that even the identity in the trace is the same."""
    before = describe(case)
    found, expected = step(case), parent.__call__(step, case)
    assert describe(found) == describe(expected)
    assert describe(case) == before
    assert describe(step.inverse(found)) == describe(step.inverse(expected))
    for field in FIELDS:
        if field in found:  # what somebody adds to one does not reach the other
            assert found[field].meta is not case[field].meta
            assert found[field].applied_operations is not case[field].applied_operations


@settings(max_examples=120, deadline=None)
@given(case=cases(), axcodes=st.sampled_from(CODES))
def test_an_orientation_is_as_monais(case, axcodes):
    assert_as_monai(Orientationd, orientation(FIELDS, axcodes=axcodes), case)


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_a_spacing_is_as_monais(case):
    assert_as_monai(Spacingd, spacing(FIELDS, spacing=TARGET), case)


def make_case(affine=None, **more):
    affine = np.diag([*TARGET, 1.0]) if affine is None else affine
    voxels = torch.arange(2 * 3 * 4.0).view(1, 2, 3, 4)
    return {name: MetaTensor(voxels + i, affine=torch.from_numpy(affine)) for i, name in enumerate(FIELDS)} | more


@pytest.fixture
def monai_only(monkeypatch):
    """Refuse MONAI's way: what comes back has not gone it."""

    def refuse(*_, **__):
        raise AssertionError("MONAI was asked")

    monkeypatch.setattr(Orientationd, "__call__", refuse)
    monkeypatch.setattr(Spacingd, "__call__", refuse)
    monkeypatch.setattr("monai.transforms.spatial.array.Orientation.__call__", refuse)


@pytest.mark.parametrize("degrees", [0.0, 20.0])
def test_monai_is_not_asked_for_what_is_there(monai_only, degrees):
    affine = np.diag([*TARGET, 1.0])
    tilted = Rotation.from_euler("xyz", [degrees] * 3, degrees=True).as_matrix().astype(np.float32)
    affine[:3, :3] = tilted @ affine[:3, :3]
    case = make_case(affine)
    found = spacing(FIELDS, spacing=TARGET)(orientation(FIELDS)(case))
    assert [step["class"] for step in found["image"].applied_operations] == ["Orientation", "SlabResample"]
    assert found["image"].as_tensor().data_ptr() == case["image"].as_tensor().data_ptr()  # nothing was copied
    with pytest.raises(AssertionError, match="MONAI was asked"):
        orientation(FIELDS, axcodes="LPS")(case)
    with pytest.raises(AssertionError, match="MONAI was asked"):
        spacing(FIELDS, spacing=(1, 1, 1))(case)


def add_pending(case):
    case["image"].push_pending_operation({"lazy_affine": torch.eye(4).double(), "lazy_shape": (2, 3, 4)})
    return case


def add_sides(case):
    case["label"].meta["pixdim"] = np.ones(8)
    return case


def make_batch(case):
    case["image"].is_batch = True
    return case


def stop_tracing(step):
    for traced in (getattr(step, "ornt_transform", None), getattr(step, "spacing_transform", None)):
        if traced is not None:
            traced.tracing = False
            getattr(traced, "sp_resample", traced).tracing = False


@pytest.mark.parametrize("change", [add_pending, add_sides, make_batch])
@pytest.mark.parametrize("make", [orientation, lambda fields: spacing(fields, spacing=TARGET)])
def test_what_is_not_plain_is_left_to_monai(monai_only, change, make):
    make(FIELDS)(make_case())
    with pytest.raises(AssertionError, match="MONAI was asked"):
        make(FIELDS)(change(make_case()))
    step = make(FIELDS)
    stop_tracing(step)
    with pytest.raises(AssertionError, match="MONAI was asked"):
        step(make_case())
    with pytest.raises(AssertionError, match="MONAI was asked"):
        make(FIELDS)(make_case(), lazy=True)
    set_track_meta(False)
    try:
        with pytest.raises(AssertionError, match="MONAI was asked"):
            make(FIELDS)(make_case())
    finally:
        set_track_meta(True)


def test_dictionaries_of_metadata_beside_a_volume_are_left_to_monai(monai_only):
    with pytest.raises(AssertionError, match="MONAI was asked"):
        spacing(FIELDS, spacing=TARGET)(make_case(image_meta_dict={}))


def test_a_case_that_is_not_resampled_needs_no_memory_for_it(monkeypatch):
    monkeypatch.setattr(bounded_spacing, "ALWAYS_FITS", 0)
    monkeypatch.setattr(bounded_spacing, "available_bytes", lambda: 0)
    assert spacing(FIELDS, spacing=TARGET)(make_case())["image"].shape == (1, 2, 3, 4)
    with pytest.raises(bounded_spacing.GridError, match="GiB to resample"):
        spacing(FIELDS, spacing=(1, 1, 1))(make_case())


def test_tolerances_are_stricter_than_monais():
    assert bounded_spacing.PLAIN_SHIFT <= bounded_spacing.AFFINE_TOL / 10


def test_only_what_is_looked_at_can_be_set():
    with pytest.raises(TypeError, match="align_corners"):
        BoundedSpacing(FIELDS, pixdim=TARGET, mode="bilinear", align_corners=True)
