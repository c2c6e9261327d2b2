"""The wrapper is the network to a training loop: names, state, modes, copies."""

import copy

import pytest
import torch
from torch import nn

from volseg.errors import ParallelError
from volseg.parallel import ModelParallel


def net() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.Dropout3d(0.5))


def parallel(plain: nn.Module) -> ModelParallel:
    return ModelParallel(plain, strategy="spatial", devices=["cpu"] * 2)


def test_names_are_those_of_the_network() -> None:
    plain = net()
    model = parallel(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert dict(model.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    assert all(a is b for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert model.module is plain


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


def test_modes_and_gradients_reach_the_network() -> None:
    model = parallel(net())
    assert not model.eval().module[1].training
    assert model.train().module.training
    model(torch.randn(1, 1, 6, 4, 4)).mean().backward()
    assert model.module[0].weight.grad is not None
    model.zero_grad()
    assert model.module[0].weight.grad is None
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.module.parameters())


def test_a_copy_has_its_own_parameters() -> None:
    model = parallel(net())
    twin = copy.deepcopy(model)
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert next(twin.parameters()) is not next(model.parameters())
    assert twin(torch.randn(1, 1, 6, 4, 4)).shape == (1, 2, 6, 4, 4)


def test_partition_can_be_printed() -> None:
    assert "shard 1 on cpu" in str(parallel(net()).partition)


def test_options_of_the_spatial_strategy_are_refused_for_a_pipeline():
    for options in ({"checkpoint": "all"}, {"on_unsupported": "gather"}):
        with pytest.raises(ParallelError, match="belong to strategy='spatial'; leave them out for a pipeline"):
            ModelParallel(nn.Conv3d(1, 1, 1), split_size=2, devices=["cpu", "cpu"], **options)


@pytest.mark.parametrize(("split_size", "chosen"), [(None, "spatial"), (2, "pipeline")])
def test_auto_says_what_it_takes_and_why(split_size, chosen, caplog):
    with caplog.at_level("INFO", logger="volseg.parallel.model_parallel"):
        ModelParallel(nn.Conv3d(1, 1, 1), split_size=split_size, devices=["cpu", "cpu"])
    assert f"takes {chosen}" in caplog.text
