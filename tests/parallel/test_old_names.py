"""Names of before the move keep working for a release, and say where they are now."""

import importlib

import pytest

import volseg.losses
import volseg.parallel
from volseg.parallel.spatial import SpatialStrategy
from volseg.parallel.verification import comparison, verify

OLD = {
    ("sharding", "SpatialStrategy"): SpatialStrategy,
    ("sharding", "scatter_batch"): volseg.parallel.scatter_batch,
    ("sharding", "CapturedStep"): volseg.parallel.RecordedStep,
    ("sharding.graphs", "CapturedStep"): volseg.parallel.RecordedStep,
    ("sharding.scatter", "from_slab"): volseg.parallel.from_slab,
    ("sharding.scatter", "slab_shape"): volseg.parallel.slab_shape,
    ("sharding.dice_cross_entropy", "Terms"): volseg.losses.Terms,
    ("sharding.dice_cross_entropy", "dice_cross_entropy"): volseg.losses.dice_cross_entropy,
    ("sharding.verify", "TOLERANCE"): verify.TOLERANCE,
    ("sharding.verify", "compare"): comparison.compare,
    ("sharding.verify", "verify"): volseg.parallel.verify,
}


@pytest.mark.parametrize(("module", "name"), OLD)
def test_an_old_name_is_the_new_one_and_warns(module: str, name: str) -> None:
    old = importlib.import_module(f"volseg.parallel.{module}")
    with pytest.warns(FutureWarning, match=f"volseg.parallel.{module}.{name} is volseg"):
        found = getattr(old, name)
    assert found is OLD[module, name]


def test_a_name_that_never_was_is_absent() -> None:
    old = importlib.import_module("volseg.parallel.sharding")
    with pytest.raises(AttributeError, match="no attribute 'Sharding'"):
        old.Sharding  # noqa: B018
