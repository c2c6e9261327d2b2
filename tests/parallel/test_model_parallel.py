"""To a training loop the wrapper is the network: names, state, modes, copies."""

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


def test_auto_takes_the_spatial_split_and_runs_forward_once():
    plain = net()
    calls = []
    plain.register_forward_pre_hook(lambda module, inputs: calls.append(1))
    model = ModelParallel(plain, devices=["cpu"] * 2)
    model(torch.randn(1, 1, 6, 4, 4))
    assert (model.chosen, model.why) == ("spatial", "no split_size was given")
    assert calls == [1]


class Transformed(nn.Conv3d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(super().forward(x), dim=2).real


@pytest.mark.parametrize("options", [{}, {"strategy": "spatial"}, {"checkpoint": "all"}])
def test_an_operator_without_a_sharded_form_is_refused_with_the_name_of_the_pipeline(options):
    model = ModelParallel(Transformed(1, 2, 1), devices=["cpu"] * 2, **options)
    with pytest.raises(UnsupportedOperatorError, match=r"fft.*strategy='pipeline'"):
        model(torch.randn(1, 1, 6, 4, 4))


def test_strategies_say_what_a_training_loop_asks():
    """`tests/experiment/test_parallel.py` tests this for a group of processes."""
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
        ({"strategy": "spatial", "record": True}, "record=True is not an option of the spatial split .* has axes, "),
        ({"cuts": ["1"]}, r"cuts=\['1'\] is not an option of the spatial split \(no split_size was given\)"),
        (
            {"split_size": 2, "checkpoint": "all"},
            "'all' is not an option of a pipeline .*leave it out, or pass another str",
        ),
        ({"strategy": Spatial(), "checkpoint": "all"}, r"checkpoint cannot be combined .* to Spatial\(...\)"),
        ({"strategy": Pipeline(), "split_size": 2}, r"split_size cannot be combined .* to Pipeline\(...\)"),
        ({"strategy": 3}, r"must be one of auto, spatial, pipeline, got 3; or Spatial\(...\), Pipeline\(...\)"),
        ({"split_size": 2, "record": "graphs"}, "record must be 'auto', True or False, got 'graphs'"),
        ({"split_size": 2, "record": 1}, "record must be 'auto', True or False, got 1"),
    ],
)
def test_an_option_that_a_strategy_does_not_have_is_refused_with_those_that_it_has(keywords, message):
    with pytest.raises(ParallelError, match=message):
        ModelParallel(net(), devices=["cpu"] * 2, **keywords)


def test_a_pipeline_says_that_it_cuts_no_volumes_and_records_by_itself():
    model = ModelParallel(net(), split_size=2, devices=["cpu"] * 2)
    with pytest.raises(
        ParallelError, match="only strategy='spatial' cuts volumes and scatters batches; this model is a pipe"
    ):
        scatter_batch(model, {})
    with pytest.raises(
        ParallelError, match="only a step of strategy='spatial' can be recorded; a pipeline records its batches"
    ):
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
    refused = pytest.raises(UnsupportedOperatorError, match=r"supports only reverse-mode derivatives.*torch\.func\.jvp")
    with refused:
        torch.func.jvp(model, (x,), (x,))
    with refused, forward_ad.dual_level():
        model(forward_ad.make_dual(x, x))
    model(x)
