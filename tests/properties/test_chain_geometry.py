"""From an image file to its label map, every structure stays at its place in the patient, in mm.

The "network" tells bright from dark voxels, so what it should find is known at every place: two balls of different
size, off the centre, so that no flip and no swap of axes passes for another.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nibabel.orientations import io_orientation
from volume_files import CODES, FORMATS, tilt, turn

from volseg.data.case_store.preprocessed import prepare
from volseg.data.readers import read_volume
from volseg.inference.original_grid import resample
from volseg.inference.predictor import Predictor
from volseg.inference.writing import write_prediction
from volseg.transforms.grid import Grid
from volseg.transforms.preprocessing import build_preprocessing

pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")

CENTRE = np.array([17.0, -23.0, 41.0])
BALLS = {1: (np.array([11.0, 7.0, -6.0]), 10.0), 2: (np.array([-9.0, -11.0, 8.0]), 7.0)}
"""Value, place from the centre and radius, mm."""

INTENSITIES = {1: 100, 2: -100}
"""Of either sign: no value between a ball and what is around it is the other ball's."""

RESAMPLED = [{"name": "Orientation"}, {"name": "Spacing", "spacing": [2, 2, 2]}, {"name": "Pad", "multiple": 4}]


def tell(images):
    """Return logits whose softmax gives the shares of background and of each ball in a voxel.

    In proportion: a network that jumped from one to the other would round a surface to whole voxels of its own grid.
    """
    balls = torch.cat([images, -images], 1).clamp(0, 100) / 100
    return torch.cat([1 - balls.sum(1, keepdim=True), balls], 1).clamp(1e-6, 1).log()


FINE, COARSE = (st.tuples(*[st.floats(finest, 4)] * 3) for finest in (1.2, 2))
OF_CUBES = st.just((2.5, 2.5, 2.5))
"""A step to the spacing that a file has resamples nothing."""


@st.composite
def grids(draw, spacings):
    """Draw the shape and the affine of a grid of 60 mm about the centre: 48 orientations, any spacing and tilt."""
    spacing = np.array(draw(spacings))
    shape = tuple(np.ceil(60 / spacing).astype(int).tolist())
    degrees = draw(st.lists(st.floats(-30, 30), min_size=3, max_size=3))
    affine = turn(draw(st.sampled_from(CODES)), spacing, tilt(*degrees))
    affine[:3, 3] = CENTRE - affine[:3, :3] @ (np.array(shape) - 1) / 2
    return shape, affine


def places_of(shape, affine):
    """Return the position of each voxel relative to the centre (mm), ``(D, H, W, 3)``."""
    indices = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    return indices @ affine[:3, :3].T + affine[:3, 3] - CENTRE


def labels_at(places):
    labels = np.zeros(places.shape[:3], np.uint8)
    for value, (at, radius) in BALLS.items():
        labels[np.linalg.norm(places - at, axis=-1) < radius] = value
    return labels


def image_on(shape, affine):
    labels = labels_at(places_of(shape, affine))
    return np.array([0, INTENSITIES[1], INTENSITIES[2]], np.int16)[labels]


def predict(path, steps, folder, window=(24, 24, 24), mirror=False):
    """Go the whole way from an image's file to its label map's."""
    case = prepare({"case": "a", "image": path}, build_preprocessing(steps))
    predictor = Predictor(model=tell, num_classes=3, window=window, overlap=0.25, mirror=mirror)
    return nibabel.load(write_prediction(predictor(case), case["image"], folder / f"{path.name}_labels.nii.gz"))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=4)
@given(
    grid=grids(OF_CUBES | COARSE),
    target=st.sampled_from(CODES),
    margin=st.integers(0, 2),
    multiple=st.sampled_from([1, 4, 16]),
    window=st.tuples(*[st.integers(8, 24)] * 3),
    mirror=st.booleans(),
)
def test_without_resampling_every_voxel_has_the_label_of_its_place(
    name, grid, target, margin, multiple, window, mirror
):
    """In any format, only the label map's own header gives its voxels' positions."""
    steps = [{"name": "Orientation", "axcodes": target}, {"name": "CropForeground", "margin": margin}]
    if np.allclose(np.linalg.norm(grid[1][:3, :3], axis=0), 2.5):
        steps.append({"name": "Spacing", "spacing": [2.5] * 3})
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        FORMATS[name](path, image_on(*grid), grid[1])
        written = predict(path, [*steps, {"name": "Pad", "multiple": multiple}], Path(folder), window, mirror)
        places = places_of(written.shape, written.affine)
        # A voxel on the surface may lie on either side of it, by the last digits of the affine.
        sure = np.all([abs(np.linalg.norm(places - at, axis=-1) - r) > 1e-3 for at, r in BALLS.values()], axis=0)
        np.testing.assert_array_equal(np.asarray(written.dataobj)[sure], labels_at(places)[sure])
        assert sorted(written.shape) == sorted(grid[0])


@settings(max_examples=5)
@given(grids(FINE))
def test_through_another_spacing_a_structure_stays_where_it_is(grid):
    """On the image's grid, its middle is that of the voxels in the ball, and its surface less than a voxel away."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.nii.gz"
        FORMATS[path.name](path, image_on(*grid), grid[1])
        written = predict(path, RESAMPLED, Path(folder))
        found = np.asarray(written.dataobj)
    np.testing.assert_allclose(written.affine, grid[1], atol=1e-4)
    places = places_of(*grid)
    expected = labels_at(places)
    side = np.linalg.norm(grid[1][:3, :3], axis=0).max()
    for value, (at, radius) in BALLS.items():
        apart = places[found == value].mean(axis=0) - places[expected == value].mean(axis=0)
        # A shift by half a voxel of either grid, the usual mistake, is 0.6 mm at least; surfaces that are rounded
        # differently move the middle of a ball by far less, since all sides are.
        assert np.linalg.norm(apart) < 0.3, apart
        distances = np.linalg.norm(places - at, axis=-1) - radius
        away = distances[(found == value) != (expected == value)]
        assert abs(away).max(initial=0) < side


@settings(max_examples=15)
@given(
    shape=st.tuples(*[st.integers(6, 15)] * 3),
    axes=st.sampled_from(CODES),
    spacing=st.tuples(*[st.floats(0.5, 2.0)] * 3),
    origin=st.tuples(*[st.floats(-200, 200)] * 3),
)
def test_a_place_in_the_patient_keeps_its_value(shape, axes, spacing, origin):
    """Values are the positions: a linear function, which trilinear interpolation reproduces exactly."""
    source, target = Grid(shape, place_axes(axes, spacing, 11, origin)), (5, 4, 3)
    target = Grid(target, source.affine @ place_axes("RAS", (0.7, 0.9, 0.8), 0, (1.2, 1.1, 1.3)))
    values, wanted = (
        torch.from_numpy(places_of(grid.shape, grid.affine.numpy()) + CENTRE).movedim(-1, 0)
        for grid in (source, target)
    )
    # Positions of up to 250 mm in float32 (2e-5 mm each), of which eight are averaged.
    torch.testing.assert_close(resample(target, values.float(), source), wanted.float(), atol=2e-4, rtol=0)


def place_axes(axes, spacing, degrees, origin):
    """Return the affine of voxel axes that point to ``axes``, tilted about the first world axis."""
    affine = turn(axes, spacing, tilt(degrees, 0, 0))
    affine[:3, 3] = origin
    return torch.from_numpy(affine)


CODED = {"both": (1, 1), "atlas": (4, 1), "sform alone": (2, 0), "qform alone": (0, 1)}


@pytest.mark.parametrize("codes", CODED.values(), ids=CODED)
def test_the_label_map_has_the_image_files_sform_and_qform(tmp_path, codes):
    """The reader uses the sform, other programs the qform; the label map fits the image in both."""
    shape, affine = (30, 20, 40), np.diag([-2.0, 3.0, 1.5, 1.0])
    affine[:3, 3] = CENTRE - affine[:3, :3] @ (np.array(shape) - 1) / 2
    image = nibabel.Nifti1Image(image_on(shape, affine), None)
    image.set_sform(affine, code=codes[0])
    elsewhere = affine.copy()
    elsewhere[:3, 3] += (0, 0, 5) if codes[0] else 0
    image.set_qform(elsewhere, code=codes[1])
    image.to_filename(tmp_path / "a.nii.gz")
    written, read = predict(tmp_path / "a.nii.gz", RESAMPLED, tmp_path), nibabel.load(tmp_path / "a.nii.gz")
    for key in ("sform_code", "qform_code"):
        assert written.header[key] == read.header[key]
    np.testing.assert_array_equal(written.affine, read.affine)
    if codes[1]:
        np.testing.assert_allclose(written.get_qform(), read.get_qform(), atol=1e-5)  # quaternions in float32
    for value in BALLS:
        assert (np.asarray(written.dataobj) == value).sum() == pytest.approx(
            (image_on(shape, affine) == INTENSITIES[value]).sum(), rel=0.1
        )


# One volume, written in every format and orientation, lies at the same place in the patient.


# NIfTI keeps float32 in its sform, NRRD and MHA about 12 digits, DICOM 16 characters: 1e-4 mm bounds them all here.
TOLERANCE_MM = 1e-4


@st.composite
def volumes(draw):
    """Voxels that are all different, and an affine: any of 48 orientations, any spacing, tilted up to 20 degrees."""
    shape = tuple(draw(st.lists(st.integers(2, 6), min_size=3, max_size=3)))
    voxels = np.random.default_rng(draw(st.integers(0, 99))).permutation(np.prod(shape)).reshape(shape)
    spacing = draw(st.lists(st.floats(0.3, 5.0), min_size=3, max_size=3))
    degrees = draw(st.lists(st.floats(-20, 20), min_size=3, max_size=3))
    affine = turn(draw(st.sampled_from(CODES)), spacing, tilt(*degrees))
    affine[:3, 3] = draw(st.lists(st.floats(-200, 200), min_size=3, max_size=3))
    return voxels.astype(np.int16), affine


@settings(max_examples=20)
@given(volumes())
def test_every_format_places_the_same_voxels_in_the_same_place(volume):
    voxels, affine = volume
    where = {int(value): affine[:3] @ [*index, 1.0] for index, value in np.ndenumerate(voxels)}
    with TemporaryDirectory() as folder:
        for name, write in FORMATS.items():
            path = Path(folder) / name
            write(path, voxels, affine)
            read = read_volume(path)
            assert read.shape[0] == 1
            found = read.affine.numpy()
            if name != "a_dicom":  # a series has no order of its own: slices are sorted along their normal
                np.testing.assert_array_equal(read.numpy()[0], voxels)
                np.testing.assert_array_equal(io_orientation(found), io_orientation(affine))
            places = np.array([found[:3] @ [*index, 1.0] for index in np.ndindex(*read.shape[1:])])
            expected = np.array([where[int(value)] for value in read.numpy().ravel()])
            np.testing.assert_allclose(places, expected, atol=TOLERANCE_MM, rtol=0, err_msg=name)
