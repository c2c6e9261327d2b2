"""A recorded network predicts what it predicts eagerly; a network that cannot be recorded runs eagerly."""

import logging
from itertools import pairwise

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import nn

from volseg.errors import ParallelError
from volseg.inference.predictor import _FAST as FAST
from volseg.inference.predictor import Predictor
from volseg.inference.window_step import (
    MOST_WINDOWS,
    RecordedModel,
    choose_windows_per_step,
    explain_kernel_by_kernel,
    record_models,
)
from volseg.parallel import FastKernels, ModelParallel

GIB = 2**30
GPU = torch.device("cuda", 0)


def network(seed: int = 0, **more) -> nn.Module:
    torch.manual_seed(seed)
    return DynUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=3,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 32],
        **more,
    ).eval()


def test_models_that_no_gpu_holds_stay_as_they_are():
    function, on_cpu = torch.sigmoid, nn.Conv3d(1, 2, 1)
    assert record_models([function, on_cpu]) == (function, on_cpu)
    assert "function" in explain_kernel_by_kernel(function)
    assert "cpu" in explain_kernel_by_kernel(on_cpu)
    cut = ModelParallel(nn.Conv3d(1, 2, 3, padding=1), strategy="spatial", devices=["cpu", "cpu"])
    assert "several devices" in explain_kernel_by_kernel(cut)
    assert "its own strategy" in explain_kernel_by_kernel(nn.Sequential(cut))
    with pytest.raises(ParallelError, match="on one GPU"):
        RecordedModel(on_cpu)


@pytest.mark.parametrize(
    ("window", "classes", "free", "count"),
    [
        ((128, 128, 128), 3, 100 * GIB, 1),  # keeps the device busy by itself
        ((192, 128, 96), 3, 100 * GIB, 1),
        ((40, 56, 40), 3, 100 * GIB, 23),
        ((8, 8, 8), 3, 100 * GIB, MOST_WINDOWS),
        ((40, 56, 40), 117, 4 * GIB, 3),
        ((160, 160, 160), 117, GIB, 1),  # never none
    ],
)
def test_as_many_windows_go_together_as_keep_a_gpu_busy_and_fit(window, classes, free, count):
    models = [FastKernels(nn.Conv3d(1, 2, 1), "cpu")]
    assert choose_windows_per_step(models, window, classes, GPU, free_bytes=free) == count


def test_what_keeps_windows_apart():
    plain, batch_norm = nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2, track_running_stats=False)
    assert choose_windows_per_step([plain], (128,) * 3, 3, GPU, free_bytes=100 * GIB) == 2  # torch's kernels: two
    assert choose_windows_per_step([nn.Sequential(plain, batch_norm)], (8,) * 3, 3, GPU, free_bytes=100 * GIB) == 1
    assert choose_windows_per_step([], (8, 8, 8), 3, torch.device("cpu")) == 1
    with pytest.raises(ParallelError, match="got meta"):
        choose_windows_per_step([], (8, 8, 8), 3, torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("mirror", [False, [0, 2]])
@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_recorded_network_predicts_as_it_does_kernel_by_kernel(fast, mirror, num_models, autocast):
    models = [network(seed).to(GPU) for seed in range(num_models)]
    if fast:
        models = [FastKernels(model, GPU) for model in models]
    image = torch.randn(1, 1, 86, 50, 40)
    # 5 x 3 x 2 windows, 4 at a time: full batches, and a last one of 2
    settings = {"num_classes": 3, "window": (32, 32, 32), "windows_per_step": 4, "autocast": autocast, "mirror": mirror}
    plain = Predictor(model=models, fast=False, **settings).probabilities(image)
    recorded = record_models(models)
    assert all(isinstance(model, RecordedModel) for model in recorded)
    predictor = Predictor(model=recorded, **settings)
    for _ in range(3):
        # The same kernels on the same numbers; a library may choose another one while it is recorded.
        tolerance = {"atol": 2e-2, "rtol": 0} if autocast else {"atol": 1e-5, "rtol": 0}
        torch.testing.assert_close(predictor.probabilities(image), plain, **tolerance)
    assert [model.num_recorded for model in recorded] == [2] * num_models
    assert not any(model.refused for model in recorded)


@pytest.mark.gpu
def test_a_recording_follows_weights_that_are_loaded_and_modes_that_change():
    model, other, image = network(0).to(GPU), network(1).to(GPU), torch.randn(1, 1, 32, 32, 32)
    (recorded,) = record_models([model])
    predictor = Predictor(model=recorded, num_classes=3, window=(16, 16, 16), windows_per_step=1)
    predictor.probabilities(image)
    assert recorded.num_recorded == 1
    model.load_state_dict(other.state_dict())
    expected = Predictor(model=other, num_classes=3, window=(16, 16, 16), fast=False).probabilities(image)
    torch.testing.assert_close(predictor.probabilities(image), expected, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_predictor_is_fast_by_itself_and_leaves_the_network_as_it_is(autocast):
    model, other, image = network(0).to(GPU), network(1).to(GPU), torch.randn(1, 1, 86, 50, 40)
    settings = {"num_classes": 3, "window": (32, 32, 32), "autocast": autocast}
    tolerance = {"atol": 5e-2 if autocast else 1e-4, "rtol": 0}
    strides = [parameter.stride() for parameter in model.parameters()]
    predictor = Predictor(model=model, **settings, windows_per_step=4)
    for _ in range(3):
        expected = Predictor(model=model, fast=False, **settings).probabilities(image)
        torch.testing.assert_close(predictor.probabilities(image), expected, **tolerance)
        with torch.no_grad():  # as an optimizer does
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                mine.lerp_(its, 0.5)
    (recorded,) = FAST[predictor].make([model], GPU)
    assert isinstance(recorded.model, FastKernels)
    assert recorded.num_recorded == 2
    assert [parameter.stride() for parameter in model.parameters()] == strides
    model.load_state_dict(other.state_dict(), assign=True)
    expected = Predictor(model=other, fast=False, **settings).probabilities(image)
    torch.testing.assert_close(predictor.probabilities(image), expected, **tolerance)


@pytest.mark.gpu
def test_a_network_that_is_trained_keeps_its_gradients_and_is_not_recorded():
    model = network().to(GPU)
    model(torch.randn(1, 1, 32, 32, 32, device=GPU)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    predictor = Predictor(model=model, num_classes=3, window=(32, 32, 32))
    predictor.probabilities(torch.randn(1, 1, 86, 50, 40))
    assert predictor not in FAST
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad.equal(gradient)


@pytest.mark.gpu
def test_a_function_without_fast_kernels_predicts_with_those_of_torch(caplog):
    class Spectrum(nn.Module):
        """Calls a function that has no form on slabs."""

        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv3d(1, 3, 1)

        def forward(self, windows):
            return self.convolution(torch.fft.fftn(windows.float(), dim=(2, 3, 4)).abs())

    model, image = Spectrum().to(GPU), torch.randn(1, 1, 48, 32, 32)
    settings = {"num_classes": 3, "window": (16, 16, 16)}
    expected = Predictor(model=model, fast=False, **settings).probabilities(image)
    with caplog.at_level(logging.INFO):
        found = Predictor(model=model, **settings).probabilities(image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert "Spectrum predicts with torch's kernels" in caplog.text


class LooksAtValues(nn.Module):
    """Doubles bright values, a decision that a recording cannot repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv3d(1, 3, 1)

    def forward(self, windows):
        return self.convolution(windows * 2 if windows.mean().item() > 0 else windows)


class Counts(nn.Module):
    """Answers otherwise every second time, by a number that Python counts."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv3d(1, 3, 1)
        self.calls = 0

    def forward(self, windows):
        self.calls += 1
        return self.convolution(windows) * (-1) ** self.calls


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [LooksAtValues, Counts])
def test_what_a_replay_would_get_wrong_runs_kernel_by_kernel_and_says_so(kind, caplog):
    model, image = kind().to(GPU), torch.randn(1, 1, 32, 32, 32)
    settings = {"num_classes": 3, "window": (16, 16, 16), "windows_per_step": 1}
    plain = Predictor(model=model, fast=False, **settings).probabilities(image)
    if isinstance(model, Counts):
        model.calls = 0
    (recorded,) = record_models([model])
    with caplog.at_level(logging.WARNING):
        again = Predictor(model=recorded, **settings).probabilities(image)
    torch.testing.assert_close(again, plain, atol=1e-6, rtol=0)
    assert recorded.refused
    assert "the network that predicts cannot be recorded" in caplog.text
    assert "inference.record" in caplog.text


@pytest.mark.gpu
def test_dropout_that_works_in_evaluation_is_drawn_anew_in_every_replay():
    class Uncertain(nn.Module):
        """Monte-Carlo dropout."""

        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv3d(1, 64, 1)

        def forward(self, windows):
            return nn.functional.dropout(self.convolution(windows), 0.5, training=True)

    (recorded,) = record_models([Uncertain().to(GPU)])
    window = torch.randn(1, 1, 16, 16, 16, device=GPU)
    with torch.no_grad():
        drawn = [recorded(window).clone() for _ in range(6)]
    assert recorded.num_recorded == 1
    assert not any(one.equal(other) for one, other in pairwise(drawn))


@pytest.mark.gpu
def test_freed_recordings_give_their_memory_back():
    models = record_models([network(seed).to(GPU) for seed in range(2)])
    window = torch.randn(1, 1, 64, 64, 64, device=GPU)
    held = []
    for made in (1, 2):  # what libraries keep for a stream, they keep since the first time
        with torch.no_grad():
            for _ in range(4):
                for model in models:
                    model(window)
        assert [model.num_recorded for model in models] == [made, made]
        recorded = torch.cuda.memory_reserved(GPU)
        for model in models:
            model.release()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved(GPU))
        assert held[-1] < recorded
    assert held[1] <= held[0]
