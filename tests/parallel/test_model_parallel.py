"""The wrapper is the network to a training loop: names, state, modes, copies."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import FastKernels, ModelParallel, Pipeline, RecordedStep, Spatial, scatter_batch


def net() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.Dropout3d(0.5))


def parallel(plain: nn.Module) -> ModelParallel:
    return ModelParallel(plain, strategy="spatial", devices=["cpu"] * 2)


def test_names_modes_and_gradients_are_those_of_the_network() -> None:
    plain = net()
    model = parallel(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert dict(model.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    assert all(a is b for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not model.eval().module[1].training
    assert model.train().module.training
    model(torch.randn(1, 1, 6, 4, 4)).mean().backward()
    assert plain[0].weight.grad is not None
    model.zero_grad()
    assert plain[0].weight.grad is None
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in plain.parameters())


def test_state_moves_between_plain_and_parallel_also_inside_another_module() -> None:
    model, other = parallel(net()), net()
    other.load_state_dict(model.state_dict())
    model.load_state_dict(net().state_dict())
    parent = nn.ModuleDict({"net": model})
    state = {f"net.{name}": torch.full_like(value, 3) for name, value in other.state_dict().items()}
    parent.load_state_dict(state)
    assert list(parent.state_dict()) == list(state)
    assert model.module[0].bias[0].item() == 3
    with pytest.raises(RuntimeError, match="Missing key"):
        parent.load_state_dict({})


class Unshardable(nn.Module):
    """Norm (buffers), dropout (random numbers), then an operator without a sharded form."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.Dropout(0.5))
        self.last = nn.Conv3d(2, 2, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(torch.fft.fft(self.layers(x), dim=2).real)


@pytest.mark.parametrize("devices", [1, 2])
def test_auto_takes_the_layers_where_an_operator_has_no_sharded_form(devices, caplog):
    """The attempt leaves no trace: the same numbers as by the pipeline alone."""
    trained = []
    for strategy in ("auto", "pipeline"):
        torch.manual_seed(0)
        model = ModelParallel(Unshardable(), strategy=strategy, devices=["cpu"] * devices)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # made before the choice, as in any loop
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 1, 6, 4, 4)).square().mean()
            loss.backward()
            optimizer.step()
        trained.append((model, loss.item(), torch.rand(3)))
    (auto, loss, after), (pipeline, expected_loss, expected_after) = trained
    assert torch.equal(after, expected_after)
    # float32: two pipelines measure their layers each, and may cut the batch differently.
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(auto.state_dict(), pipeline.state_dict())
    assert auto.chosen == "pipeline"
    assert "fft" in auto.why
    assert caplog.text.count("takes the pipeline: an operator of the network has no sharded form") == 1
    assert type(auto.strategy) is type(pipeline.strategy)


def test_auto_stays_spatial_where_it_can_and_runs_forward_once(caplog):
    plain = net()
    calls = []
    plain.register_forward_pre_hook(lambda module, inputs: calls.append(1))
    model = ModelParallel(plain, devices=["cpu"] * 2)
    assert (model.chosen, model.why) == ("spatial", "no split_size was given")
    model(torch.randn(1, 1, 6, 4, 4))
    assert (model.chosen, model.why) == ("spatial", "every operator of the first volume has a sharded form")
    assert calls == [1]
    assert "pipeline" not in caplog.text


@pytest.mark.parametrize("options", [{"strategy": "spatial"}, {"checkpoint": "all"}, {"axes": "D"}])
def test_who_asks_for_the_spatial_split_is_told_what_it_cannot(options):
    model = ModelParallel(Unshardable(), devices=["cpu"] * 2, **options)
    with pytest.raises(UnsupportedOperatorError, match="fft"):
        model(torch.randn(1, 1, 6, 4, 4))


def test_strategies_say_what_a_training_loop_asks():
    """Of a group of processes `tests/experiment/test_parallel.py` tells, which trains in one."""
    net = nn.Conv3d(1, 2, 3, padding=1)
    cases = (
        (ModelParallel(net, strategy="spatial", devices=["cpu"]), (False, True)),
        (ModelParallel(net, strategy="spatial", devices=["cpu", "cpu"]), (False, True)),
        (ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"]), (False, False)),
        (ModelParallel(net, split_size=1, devices=["cpu"]), (False, False)),
    )
    for model, expected in cases:
        assert (model.strategy.is_shared, model.strategy.is_recordable) == expected


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({"strategy": "spatial", "checkpoint": "all", "axes": "H"}, Spatial(checkpoint="all", axes=["H"])),
        ({"strategy": "spatial"}, Spatial()),
        ({"split_size": 2, "cuts": ["1"]}, Pipeline(split_size=2, cuts=("1",))),
        ({"strategy": "pipeline", "record": False, "batched": [0]}, Pipeline(record=False, batched=(0,))),
    ],
)
def test_keywords_are_short_for_the_options_of_a_strategy(keywords, options):
    """Both forms build the same; copies and pickles keep the options."""
    by_keywords = ModelParallel(net(), devices=["cpu"] * 2, **keywords)
    by_options = ModelParallel(net(), options, devices=["cpu"] * 2)
    for model in (by_keywords, by_options):
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert one.strategy.options == options
            assert one.chosen == options.name
            assert (one is model) == (next(one.parameters()) is next(model.parameters()))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"strategy": "spatial", "record": True}, r"record=True .* strategy='pipeline'.* strategy=Pipeline\(...\)"),
        ({"cuts": ["1"]}, r"cuts=\['1'\] .* leave it out for the spatial split \(no split_size was given\)"),
        ({"split_size": 2, "checkpoint": "all"}, "option of strategy='spatial'; leave it out for a pipeline"),
        ({"split_size": 2, "axes": "D"}, r"axes='D' is .*strategy='spatial'.* or pass strategy=Spatial\(...\)"),
        ({"strategy": Spatial(), "checkpoint": "all"}, r"checkpoint and .* options go into Spatial\(...\)"),
        ({"strategy": Pipeline(), "split_size": 2}, r"split_size and .* options go into Pipeline\(...\)"),
        ({"strategy": 3}, r"must be one of auto, spatial, pipeline, got 3; or Spatial\(...\), Pipeline\(...\)"),
        ({"split_size": 2, "record": "graphs"}, "record must be 'auto', True or False, got 'graphs'"),
        ({"split_size": 2, "record": 1}, "record must be 'auto', True or False, got 1"),
    ],
)
def test_an_option_that_a_strategy_does_not_have_is_refused_with_the_name_of_the_one_that_has(keywords, message):
    with pytest.raises(ParallelError, match=message):
        ModelParallel(net(), devices=["cpu"] * 2, **keywords)
    if keywords.get("strategy") == "spatial":
        with pytest.raises(TypeError, match=r"no option 'nothing'\. Options of strategies: axes, batched"):
            ModelParallel(net(), strategy="spatial", nothing=1)


def test_a_pipeline_says_that_it_cuts_no_volumes_and_records_by_itself():
    model = ModelParallel(net(), split_size=2, devices=["cpu"] * 2)
    with pytest.raises(ParallelError, match="batches scattered for strategy='spatial', but this model runs as a pipe"):
        scatter_batch(model, {})
    with pytest.raises(ParallelError, match="recorded for strategy='spatial', not for a pipeline, which records its"):
        RecordedStep(model, lambda x: x)
    with pytest.raises(ParallelError, match=r"one GPU per process, but this model is on \['cpu'\]"):
        RecordedStep(parallel(net()), lambda x: x)


@pytest.mark.parametrize(
    "wrap",
    [
        parallel,
        lambda plain: ModelParallel(plain, split_size=2, devices=["cpu"] * 2),
        lambda plain: FastKernels(plain, "cpu"),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, for jvp
def test_derivatives_forward_are_refused_in_words(wrap):
    """They ended in torch's errors about functions without ``jvp``, or about ``data``."""
    model, x = wrap(net()), torch.randn(2, 1, 8, 8, 8)
    refused = pytest.raises(UnsupportedOperatorError, match=r"supports reverse-mode derivatives only.*torch\.func\.jvp")
    with refused:
        torch.func.jvp(model, (x,), (x,))
    with refused, forward_ad.dual_level():
        model(forward_ad.make_dual(x, x))
    model(x)
