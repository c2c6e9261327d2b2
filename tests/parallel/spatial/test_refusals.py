"""What cannot be done on slabs is refused with function, module and remedy; or gathered, on request, with a word."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, PlacementError, UnsupportedOperatorError
from volseg.parallel import ModelParallel
from volseg.parallel.spatial import ShardedVolume

VOLUME = torch.randn(1, 2, 8, 6, 4, generator=torch.Generator().manual_seed(0))


class Sorting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=2).values


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, 2, 1)
        self.order = nn.Sequential(Sorting())

    def forward(self, x: Tensor) -> Tensor:
        return self.order(self.stem(x))


def test_an_unsupported_operator_names_itself_its_module_and_the_remedy() -> None:
    model = ModelParallel(Net(), strategy="spatial", devices=["cpu"] * 2)
    with pytest.raises(UnsupportedOperatorError) as caught:
        model(VOLUME)
    message = str(caught.value)
    for part in ("sort", "order.0 (Sorting)", "(1, 2, 8, 6, 4)", "dim=2", "docs/spatial.md", "on_unsupported='gather'"):
        assert part in message, message
    assert isinstance(caught.value, NotImplementedError)


def test_a_function_outside_the_table_is_refused() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fftn(x, dim=(2, 3, 4)).abs()

    with pytest.raises(UnsupportedOperatorError, match=r"fft_fftn.*has no sharded form"):
        ModelParallel(Spectrum(), strategy="spatial", devices=["cpu"] * 2)(VOLUME)


def test_gather_runs_it_whole_says_so_once_and_is_exact() -> None:
    net = Net()
    model = ModelParallel(net, strategy="spatial", devices=["cpu"] * 2, on_unsupported="gather")
    with pytest.warns(UserWarning, match=r"sort called from order\.0 \(Sorting\).*runs on the gathered volume") as said:
        results = [model(VOLUME) for _ in range(2)]
    result = results[1]
    assert len(said) == 1
    assert isinstance(result, ShardedVolume)
    torch.testing.assert_close(result.full_tensor(), net(VOLUME))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_custom_autograd_function_would_lose_gradients_and_is_refused() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(Doubling.apply(x))

    with pytest.raises(UnsupportedOperatorError, match=r"custom autograd\.Function.*Doubling"):
        ModelParallel(Doubled(), strategy="spatial", devices=["cpu"] * 2)(VOLUME)


def test_reentrant_checkpointing_is_refused() -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv = nn.Conv3d(2, 2, 1), nn.Conv3d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.conv, self.stem(x), use_reentrant=True).relu()

    with pytest.raises(UnsupportedOperatorError, match="use_reentrant=False"):
        ModelParallel(Reentrant(), strategy="spatial", devices=["cpu"] * 2)(VOLUME)


def test_an_ordinary_tensor_takes_in_the_gathered_volume() -> None:
    class Accumulating(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(x.shape, dtype=x.dtype)
            total += x
            total[:, :1] = x[:, :1] * 2
            return total

    expected, volume = Accumulating()(VOLUME), VOLUME.clone().requires_grad_()
    result = ModelParallel(Accumulating(), strategy="spatial", devices=["cpu", "cpu:1"])(volume)
    assert type(result) is Tensor
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    torch.testing.assert_close(volume.grad, torch.tensor([2.0, 1.0]).reshape(1, 2, 1, 1, 1).expand(VOLUME.shape))


def test_reading_numbers_of_a_volume_is_refused() -> None:
    volume = ModelParallel(nn.Identity(), strategy="spatial", devices=["cpu"] * 2)(VOLUME)
    for read in (lambda: volume.tolist(), lambda: volume.numpy(), lambda: float(volume), lambda: bool(volume)):
        with pytest.raises(UnsupportedOperatorError):
            read()
    with pytest.raises(UnsupportedOperatorError, match=r"holds 2 slabs.*\.slabs"):
        volume.to_local()


def test_a_placed_model_is_not_moved() -> None:
    model = ModelParallel(nn.Conv3d(1, 1, 1), strategy="spatial", devices=["cpu"] * 2)
    for parent in (model, nn.Sequential(model)):
        with pytest.raises(PlacementError, match=r"placed on cpu and were asked to move to meta; pass devices="):
            parent.to("meta")
    assert next(model.double().parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "diagonal"}, "strategy must be one of auto, spatial, pipeline, got 'diagonal'"),
        ({"strategy": "spatial", "split_size": 2}, "micro-batch of strategy='pipeline'"),
        ({"strategy": "spatial", "on_unsupported": "hope"}, "'raise' or 'gather', got 'hope'"),
        ({"strategy": "spatial", "devices": ["cpu"] * 2, "axes": "Q"}, "D, H, W"),
        ({"strategy": "spatial", "devices": ["cpu"] * 3, "grid": (2, 2)}, "needs 4 devices, got 3"),
        ({"strategy": "spatial", "devices": ["cpu"], "mesh": "four"}, "DeviceMesh, or a group, got str"),
        ({"strategy": "spatial", "devices": ["cpu"] * 2, "checkpoint": "some"}, "got 'some'"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict, message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        ModelParallel(nn.Conv3d(1, 1, 1), **arguments)


@pytest.mark.parametrize("norm", [nn.BatchNorm3d(2), nn.InstanceNorm3d(2)])
def test_a_norm_of_one_value_is_refused_as_torch_does(norm: nn.Module) -> None:
    image = torch.randn(1, 2, 1, 1, 1)
    for net in (norm, ModelParallel(norm, strategy="spatial", devices=["cpu"])):
        with pytest.raises(ValueError, match="Expected more than 1"):
            net(image)
