"""Distances between surfaces: by hand, by two algorithms, and by DeepMind's surface-distance."""

import base64
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volseg.errors import DataError
from volseg.evaluation import surfaces
from volseg.evaluation.overlap import evaluate_case
from volseg.evaluation.scoring import match_lesions
from volseg.evaluation.surfaces import measure_surfaces

REFERENCES = json.loads(Path(__file__).with_name("scores_reference.json").read_text(encoding="utf-8"))
"""Masks and what others make of them; tests/oracles/scores_compared.py wrote it."""


def unpack(text, shape):
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=math.prod(shape))
    return bits.astype(bool).reshape(shape)


@pytest.mark.parametrize("case", REFERENCES, ids=[str(number) for number in range(len(REFERENCES))])
def test_scores_are_those_of_the_reference_implementations(case):
    prediction, reference = (unpack(case[name], case["shape"]) for name in ("prediction", "reference"))
    found = measure_surfaces(prediction, reference, case["spacing"]).metrics(case["tolerance"])
    found["Dice"] = evaluate_case(prediction, reference, {1: "a"})[1]["Dice"]
    # Areas are float32 in MONAI's table, float64 in DeepMind's: 6e-8 of them.
    assert found == pytest.approx(case["surface-distance"], rel=1e-6, abs=1e-9)
    lesions = match_lesions(prediction, reference)
    assert [*lesions.values()][3:] == case["panoptica"]


masks = st.tuples(*[st.integers(2, 6)] * 3).flatmap(
    lambda shape: st.tuples(
        *[
            st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)).map(
                lambda voxels, shape=shape: np.array(voxels).reshape(shape)
            )
        ]
        * 2
    )
)


@settings(max_examples=40, deadline=None)
@given(pair=masks, spacing=st.tuples(*[st.sampled_from([0.3, 0.7, 1.0, 3.6])] * 3))
def test_the_tree_finds_the_bits_of_the_distance_transform(pair, spacing):
    with pytest.MonkeyPatch.context() as patch:
        by_way = []
        for voxels in (0, math.inf):  # always the tree, always the transform
            patch.setattr(surfaces, "VOXELS_PER_ELEMENT", voxels)
            by_way.append(measure_surfaces(*pair, spacing))
    if by_way[0] is None:
        assert by_way[1] is None
        assert not pair[0].any() or not pair[1].any()
        return
    for name in ("of_prediction", "of_reference"):
        assert np.array_equal(getattr(by_way[0], name), getattr(by_way[1], name))


def test_a_structure_ends_at_the_border_of_its_volume():
    whole = np.ones((4, 4, 4), dtype=bool)
    assert measure_surfaces(whole, whole, (1, 1, 1)).hausdorff() == 0
    less = whole.copy()
    less[0] = False
    assert measure_surfaces(less, whole, (2, 1, 1)).hausdorff() == 2


def test_what_nobody_annotated_has_no_surface():
    cube = np.zeros((12, 8, 8), dtype=bool)
    cube[2:10, 2:6, 2:6] = True
    shorter = cube.copy()
    shorter[7:] = False
    ignored = np.zeros_like(cube)
    ignored[6:] = True
    assert measure_surfaces(shorter, cube, (1, 1, 1)).hausdorff() == 3
    assert measure_surfaces(shorter, cube, (1, 1, 1), ignored=ignored).hausdorff() == 0
    assert measure_surfaces(shorter, cube, (1, 1, 1), ignored=np.ones_like(cube)) is None


@pytest.mark.parametrize("spacing", [(1, 1), (1, 1, 0), (1, 1, math.nan)])
def test_a_spacing_that_is_none_is_refused(spacing):
    cube = np.ones((2, 2, 2), dtype=bool)
    with pytest.raises(DataError, match="three sides in mm"):
        measure_surfaces(cube, cube, spacing)
    with pytest.raises(DataError, match="of one shape"):
        measure_surfaces(cube, cube[:1], (1, 1, 1))
