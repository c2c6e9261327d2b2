"""Names of before the move keep working for a release, and say where they are now."""

import importlib
import pickle

import pytest
import torch
from torch import nn

import volseg.losses
import volseg.parallel
from volseg.errors import ParallelError
from volseg.parallel.model_parallel import _rebuilt
from volseg.parallel.pipeline import Pipeline, PipelineStrategy
from volseg.parallel.spatial import Spatial, SpatialStrategy
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


def test_a_model_and_a_placed_network_that_were_pickled_before_are_loaded() -> None:
    """A pickle has the names of functions, those of hooks too: the move made every saved model unreadable."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = volseg.parallel.ModelParallel(net, strategy="pipeline", devices=["cpu", "cpu:1"], split_size=1)
    x = torch.randn(2, 2)
    expected = model(x)
    new = pickle.dumps(model, protocol=0)
    old = new.replace(b"volseg.parallel.pipeline.observe.run\n", b"volseg.parallel.pipeline.run\n")
    old = old.replace(b"volseg.parallel.model_parallel\n_rebuild\n", b"volseg.parallel.model_parallel\n_rebuilt\n")
    assert old.count(b"volseg.parallel.pipeline.run\n") == 2
    assert old.count(b"\n_rebuilt\n") == 1
    torch.testing.assert_close(pickle.loads(old)(x), expected)


def test_options_of_a_model_that_was_pickled_before_are_taken() -> None:
    """It says what it left out, too, and launch by its old name."""
    arguments = {"strategy": "pipeline", "devices": ["cpu"], "split_size": 1, "mesh": None, "on_unsupported": "raise"}
    with pytest.warns(FutureWarning, match="record=False"):
        model = _rebuilt(nn.Linear(2, 2), {**arguments, "checkpoint": None, "launch": "eager"})
    assert model.strategy.options == volseg.parallel.Pipeline(split_size=1, record=False)


def test_options_of_a_strategy_that_is_built_by_itself_are_taken_as_keywords() -> None:
    """``SpatialStrategy`` was found by its old name, and knew none of its options by theirs."""
    net = nn.Sequential(nn.Conv3d(1, 1, 3, padding=1), nn.Conv3d(1, 1, 1))
    devices = ["cpu", "cpu:1"]
    with pytest.warns(FutureWarning, match=r"Spatial\(axes='D', offload=True\)"):
        assert SpatialStrategy(net, devices=devices, axes="D", offload=True).options == Spatial(axes="D", offload=True)
    options = pytest.warns(FutureWarning, match=r"Pipeline\(split_size=2, cuts=\['1'\], record=False\)")
    with options, pytest.warns(FutureWarning, match="launch='eager'"):
        pipeline = PipelineStrategy(net, 2, devices, cuts=["1"], launch="eager", batched=None)
    assert pipeline.options == Pipeline(split_size=2, cuts=["1"], record=False)
    with pytest.raises(ParallelError, match="which was given too"):
        SpatialStrategy(net, Spatial(), devices, axes="D")
