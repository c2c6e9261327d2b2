"""A volume that several devices predict together has the label map that one predicts."""

import copy
import threading

import pytest
import torch
from monai.data import MetaTensor
from monai.networks.nets import DynUNet
from torch import nn

from volseg.errors import ConfigError, NonFinitePredictionError
from volseg.inference.predictor import Predictor, SharedPredictor
from volseg.inference.window_step import record_models
from volseg.inference.windows import list_layers, restrict_layers
from volseg.parallel import FastKernels
from volseg.transforms.preprocessing import build_preprocessing


def draw_case(shape=(21, 17, 30), spacing=(1.0, 1.2, 0.8)) -> dict:
    affine = torch.diag(torch.tensor([*spacing, 1.0], dtype=torch.float64))
    image = MetaTensor(torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)), affine=affine)
    return build_preprocessing([{"name": "Spacing", "spacing": [1.1, 1.0, 1.0]}])({"case": "ct", "image": image})


class Counting(nn.Module):
    """A network that counts its passes, by thread, and computes each window by itself.

    Of several at a time a CPU without AVX-512 computes other last bits than of one, and devices that share a volume
    have other windows in a pass.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, 3, 1))
        self.windows: list[int] = []

    def forward(self, windows):
        self.windows.append(threading.get_ident())
        return 5 * torch.cat([self.layers(window[None]) for window in windows])


def make(count: int, **settings) -> tuple[Predictor, SharedPredictor]:
    network = Counting()
    settings = {"num_classes": 3, "window": (8, 8, 8), **settings}
    several = [Predictor(model=copy.deepcopy(network), **settings) for _ in range(count)]
    return Predictor(model=network, **settings), SharedPredictor(several)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"memory": 9 * 8 * 8 * 4 * 4},  # cut into strips as well
        {"windows_per_step": 3, "overlap": 0.3, "mirror": (1,)},
        {"regions": True, "values": (1, 2, 7), "skip_background": True},
        {"postprocess": lambda labels: 2 - labels},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_label_maps_are_those_of_one_device(count, settings):
    case = draw_case()
    alone, together = make(count, **settings)
    ((_, expected),) = alone.stream([case], also=["entropy"])
    ((given, found),) = together.stream([case], also=["entropy"])
    assert given is case
    assert torch.equal(found.labels.as_tensor(), expected.labels.as_tensor())
    assert torch.equal(found.labels.affine, expected.labels.affine)
    assert torch.equal(found.entropy.as_tensor(), expected.entropy.as_tensor())
    computed = [predictor.model.windows for predictor in together.predictors]
    if count > 1 and "memory" not in settings:
        assert all(0 < len(windows) < len(alone.model.windows) for windows in computed)
        assert len({ident for windows in computed for ident in windows}) <= count


def test_probabilities_too_and_one_case_after_the_other():
    cases = [draw_case(), draw_case((9, 30, 12)), draw_case((5, 6, 7))]  # the last one is less than a window
    alone, together = make(2)
    expected = list(alone.stream(cases, also=["probabilities"]))
    found = list(together.stream(iter(cases), batch_size=3, also=["probabilities"]))
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert torch.equal(one.labels.as_tensor(), other.labels.as_tensor())
        assert torch.equal(one.probabilities.as_tensor(), other.probabilities.as_tensor())


def test_a_value_that_is_not_finite_is_found_in_any_part():
    for plane in (0, 29):
        case = draw_case()
        case["image"][0, 3, 3, min(plane, case["image"].shape[-1] - 1)] = float("nan")
        with pytest.raises(NonFinitePredictionError, match="case ct"):
            list(make(3)[1].stream([case]))


def test_an_error_in_a_part_is_the_cases():
    _, together = make(2)
    together.predictors[1].model.layers[0] = nn.Conv3d(2, 4, 3)
    with pytest.raises(RuntimeError, match="channels"):
        list(together.stream([draw_case()]))


def test_whole_volumes_are_not_cut():
    with pytest.raises(ConfigError, match=r"inference\.window is null"):
        make(2, window=None)


@pytest.mark.parametrize(("starts", "window", "side"), [([0, 4, 6], 8, 14), ([0, 3, 6, 9, 12, 13], 5, 18), ([0], 9, 9)])
def test_every_cell_has_all_its_windows(starts, window, side):
    layers = list_layers(starts, window, side)
    for start in range(side):
        for stop in range(start + 1, side + 1):
            kept = restrict_layers(layers, window, range(start, stop))
            assert [cell for layer in kept for cell in layer.ready] == list(range(start, stop))
            held: set[int] = set()
            done: set[int] = set()
            for layer in kept:
                assert held.isdisjoint(layer.fresh)
                held.update(layer.fresh)
                assert set(range(layer.starts[0], layer.starts[0] + window)) <= held
                done.update(layer.finished)
                for cell in layer.ready:
                    assert {cell, min(cell + 1, side - 1)} <= done
            touching = {first for first in starts if first <= min(stop, side - 1) and first + window > start}
            assert touching <= {layer.starts[0] for layer in kept}


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [3, 21])
def test_threads_replay_their_recordings_on_gpus(classes):
    """On one GPU too, where both threads have its streams and its memory."""
    torch.manual_seed(0)
    network = DynUNet(3, 1, classes, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32]).eval()
    devices = [torch.device("cuda", number % torch.cuda.device_count()) for number in range(2)]
    settings = {"num_classes": classes, "window": (16, 16, 16), "autocast": torch.bfloat16}

    def predict_on(device):
        model = FastKernels(copy.deepcopy(network), device)
        return Predictor(model=record_models([model]), device=device, **settings)

    cases = [draw_case((40, 50, 60)), draw_case((33, 60, 47))]
    alone, together = predict_on(devices[0]), SharedPredictor([predict_on(device) for device in devices])
    for _ in range(2):
        for (_, one), (_, other) in zip(together.stream(cases), alone.stream(cases), strict=True):
            assert torch.equal(one.labels.as_tensor(), other.labels.as_tensor())
    assert all(predictor.models[0].num_recorded for predictor in (alone, *together.predictors))
