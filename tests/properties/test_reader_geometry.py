"""One volume, written in every format and orientation, lies at the same place in the patient."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nibabel.orientations import io_orientation
from volume_files import CODES, FORMATS, tilt, turn

from volseg.data.readers import read_volume

pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")

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


def test_there_are_48_orientations():
    assert len(set(CODES)) == 48


@settings(max_examples=40)
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
