"""Which kernels a training runs with, and that nobody can tell from what it leaves."""

import logging

import nibabel
import numpy as np
import pytest
import torch
from monai.networks.nets import UNet

from tests.experiment.checkpoints import latest
from volseg import Hook
from volseg.data.layouts import load_task
from volseg.errors import ConfigError
from volseg.experiment import predict, train, validate
from volseg.experiment.placement import placed_network
from volseg.experiment.placement.placed_network import build_model
from volseg.models import FitGrid
from volseg.parallel import FastKernels

# float32: the two sum in another order, and six optimizer steps carry that on.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}
CPU = torch.device("cpu")


@pytest.fixture
def fast_on_the_cpu(monkeypatch):
    """Let the CPU, on which the same functions run as plain torch, stand for a GPU that has the kernels."""
    monkeypatch.setattr(placed_network, "explain_absence", lambda device: None)


@pytest.fixture
def chosen(configured, task, monkeypatch):
    """Return what becomes of a network of a config on a GPU, which the CPU stands for."""
    rehearse = placed_network._rehearse
    monkeypatch.setattr(placed_network, "explain_absence", lambda device: None)
    monkeypatch.setattr(placed_network, "_rehearse", lambda *given: rehearse(*given[:-1], CPU))

    def choose(*overrides, trains=True):
        config = configured("training.precision=bf16", *overrides)
        network = FitGrid(UNet(3, 1, 3, channels=[4, 8], strides=[2]))
        return placed_network.with_fast_kernels(network, config, 1, torch.device("cuda:0"), trains=trains)

    return choose


def test_on_a_gpu_that_is_too_old_auto_takes_the_plain_network_and_says_why(configured, monkeypatch, caplog):
    """A V100, of compute capability 7.0: nothing is compiled for it, tried on it, or raised."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr("volseg.device.triton_tiles.available", lambda: True)
    network, old = FitGrid(UNet(3, 1, 3, channels=[4, 8], strides=[2])), torch.device("cuda:0")
    reason = "they need a GPU of compute capability 8.0 or more, and cuda:0 has 7.0"
    for trains in (True, False):
        caplog.clear()
        assert placed_network.with_fast_kernels(network, configured(), 1, old, trains=trains) is None
        assert caplog.messages == [f"training.kernels is auto and takes torch's: {reason}"]
        with pytest.raises(ConfigError, match=r"training\.kernels is fast, but they need a GPU of compute capability"):
            placed_network.with_fast_kernels(network, configured("training.kernels=fast"), 1, old, trains=trains)


def test_on_a_cpu_auto_is_the_plain_network_and_says_nothing(configured, task, caplog):
    caplog.set_level(logging.INFO)
    assert type(build_model(configured(), load_task(task), CPU)) is FitGrid
    assert "kernels" not in caplog.text
    with pytest.raises(ConfigError, match=r"kernels is fast, but they are for GPUs, and no GPU is used; set"):
        train(configured("training.kernels=fast"))
    assert not configured().folder.exists()


def test_runs_of_either_kind_are_the_same_and_go_on_as_the_other(configured, task, tmp_path, fast_on_the_cpu):
    def labels(folder, name):
        (path,) = predict(folder, [task / "imagesTs"], tmp_path / name).label_maps.values()
        return np.asarray(nibabel.load(path).dataobj)

    plain = train(configured("training.kernels=torch", f"output={tmp_path / 'plain'}"))
    fast = train(configured("training.kernels=fast"))
    for mine, theirs in zip(fast.history, plain.history, strict=True):
        torch.testing.assert_close(mine.losses, theirs.losses, **TOLERANCE)
    assert [*latest(fast.folder.path).model] == [*latest(plain.folder.path).model]
    torch.testing.assert_close(latest(fast.folder.path).model, latest(plain.folder.path).model, **TOLERANCE)
    assert (labels(fast.folder, "one") != labels(plain.folder, "other")).mean() < 1e-3
    longer = train(configured("training.kernels=torch", "training.epochs=3"), resume=True)
    assert longer.folder.config().training.kernels == "torch"
    other = train(configured("training.kernels=fast", "training.epochs=3", f"output={tmp_path / 'plain'}"), resume=True)
    torch.testing.assert_close(latest(longer.folder.path).model, latest(other.folder.path).model, **TOLERANCE)
    # Dice counts voxels: a handful of ties may fall to the other side.
    assert validate(other.folder, overwrite=True).score == pytest.approx(longer.validated.score, abs=2e-3)


WINDOW = "inference.window=[16,16,16]"


def test_auto_takes_the_fast_kernels_where_they_pay(chosen):
    assert type(chosen()) is FastKernels
    assert type(chosen("training.kernels=fast", "training.accumulate=2")) is FastKernels
    assert chosen("training.kernels=torch") is None
    # Of predictions where their windows are recorded.
    assert type(chosen(WINDOW, "training.accumulate=2", trains=False)) is FastKernels
    assert type(chosen("training.kernels=fast", trains=False)) is FastKernels
    assert chosen(WINDOW, "training.kernels=torch", trains=False) is None


@pytest.mark.parametrize(
    ("trains", "overrides", "reason"),
    [
        (True, ["training.precision=fp32"], "pay in bfloat16, and training.precision is another"),
        (True, ["training.record=false"], "no step is recorded with training.record: false"),
        (True, ["training.accumulate=2"], "no step is recorded with training.accumulate: 2"),
        (True, ["optimizer={name: Adagrad, lr: 0.1}"], "with optimizer Adagrad, which is not fused"),
        (False, ["inference.window=null"], "each of another shape, are not recorded (inference.window: null)"),
        (False, [WINDOW, "inference.record=false"], "with inference.record: false"),
        (False, [WINDOW, "training.precision=fp32"], "pay in bfloat16"),
    ],
)
def test_auto_says_why_it_takes_torchs(chosen, caplog, trains, overrides, reason):
    caplog.set_level(logging.INFO)
    assert chosen(*overrides, trains=trains) is None
    (told,) = [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()]
    assert told.startswith("training.kernels is auto and takes torch's: ")
    assert reason in told


def test_a_network_without_a_form_runs_with_torchs_kernels_or_is_refused(chosen, caplog, monkeypatch):
    plain = UNet.forward

    def spectral(self, x):
        return plain(self, torch.fft.fftn(x.float(), dim=(2, 3, 4)).real)

    monkeypatch.setattr(UNet, "forward", spectral)
    caplog.set_level(logging.INFO)
    assert chosen() is None
    assert "takes torch's: fft_fftn called from" in caplog.text
    with pytest.raises(ConfigError, match=r"kernels is fast, but .*fft_fftn called from .*; set it to auto"):
        chosen("training.kernels=fast")


def test_the_spatial_strategy_on_one_device_is_refused_and_names_the_option(configured):
    with pytest.raises(ConfigError, match=r"cuts nothing.*training\.kernels: auto takes the fast kernels"):
        train(configured("parallel={strategy: spatial, devices: 1}"))


def test_one_gpu_asked_for_on_the_command_line_cuts_nothing(configured):
    spatial = "parallel={strategy: spatial}"
    assert configured(spatial).on_one_device() == configured("parallel={strategy: none}")
    recomputed = configured("parallel={strategy: spatial, checkpoint: all}").on_one_device().parallel
    assert (recomputed.strategy, recomputed.devices, recomputed.checkpoint) == ("spatial", 1, "all")
    assert configured().on_one_device().parallel.devices == 1


@pytest.mark.gpu
def test_on_a_gpu_auto_trains_with_the_fast_kernels(configured, tmp_path, caplog):
    class Seen(Hook):
        def on_training_end(self, training):
            self.network = type(training.network)

    caplog.set_level(logging.INFO)
    outcomes = {}
    for name, kind in (("auto", FastKernels), ("torch", FitGrid)):
        seen = Seen()
        outcomes[name] = train(configured(f"training.kernels={name}", f"output={tmp_path / name}"), hooks=[seen])
        assert seen.network is kind, caplog.text
    # bfloat16: a loss of three steps differs in the third digit.
    for mine, theirs in zip(outcomes["auto"].history, outcomes["torch"].history, strict=True):
        assert mine.losses["loss"] == pytest.approx(theirs.losses["loss"], rel=2e-2)
