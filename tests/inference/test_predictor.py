"""Predictions of a volume follow their definition, on one device and on several."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from monai.data import MetaTensor
from monai.networks.nets import DynUNet
from torch import nn

from volseg.errors import ConfigError, GridError, NonFinitePredictionError
from volseg.inference.predictor import Predictor, SharedPredictor
from volseg.inference.window_step import full_logits, record_models
from volseg.parallel import FastKernels
from volseg.transforms.preprocessing import build_preprocessing

SHIFTED = torch.tensor([[-1, 0, 0, 9.0], [0, 2, 0, 8], [0, 0, 3, 7], [0, 0, 0, 1]], dtype=torch.float64)


def case_of(*shape: int, name="knee_7") -> dict:
    return {"case": name, "image": MetaTensor(torch.randn(1, *shape), affine=SHIFTED.clone())}


def two_classes(images: torch.Tensor) -> torch.Tensor:
    """Return logits whose softmax is ``sigmoid(image)`` for label 1, voxel by voxel."""
    return torch.cat([-images, images], 1) / 2


def pointwise(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Conv3d(1, 3, 1)


def test_mirroring_averages_probabilities_over_all_mirrorings_of_the_axes():
    class LooksLeft(nn.Module):
        """Returns, for each voxel, its neighbour along D."""

        def forward(self, images):
            return two_classes(images.roll(1, dims=2))

    images = torch.randn(1, 1, 6, 6, 6)
    mirrored = Predictor(model=LooksLeft(), num_classes=2, mirror=[0]).probabilities(images)
    expected = (images.roll(1, dims=2).sigmoid() + images.roll(-1, dims=2).sigmoid()) / 2
    torch.testing.assert_close(mirrored[:, 1:], expected, atol=2e-7, rtol=0)  # float32, one addition


@pytest.mark.parametrize(("volumes", "together", "sizes"), [(1, 1, [1] * 8), (1, 3, [3, 3, 2]), (2, 5, [4] * 4)])
def test_mirrorings_of_a_volume_go_through_the_model_together(volumes, together, sizes):
    network, seen = pointwise(), []

    def model(images):
        seen.append(len(images))
        return network(images.cumsum(2).cumsum(4))  # each voxel sees what lies before it

    images = torch.randn(volumes, 1, 4, 3, 5)
    options = {"model": model, "num_classes": 3, "mirror": True}
    plain = Predictor(**options).probabilities(images)
    assert seen == [volumes] * 8
    seen.clear()
    got = Predictor(**options, samples_per_pass=together).probabilities(images)
    torch.testing.assert_close(got, plain, atol=1e-6, rtol=0)
    assert seen == sizes


def test_probabilities_of_several_models_are_averaged():
    folds = [pointwise(0), pointwise(1)]
    images = torch.randn(1, 1, 4, 4, 4)
    together = Predictor(model=folds, num_classes=3).probabilities(images)
    one, other = (Predictor(model=fold, num_classes=3).probabilities(images) for fold in folds)
    torch.testing.assert_close(together, (one + other) / 2, atol=1e-7, rtol=0)  # one rounding in float32


def test_predictions_do_not_depend_on_companions():
    torch.manual_seed(3)
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Conv3d(4, 3, 1))
    cases = [case_of(*shape, name=str(shape)) for shape in [(5, 6, 7), (8, 8, 8), (9, 8, 8), (4, 8, 3), (8, 7, 6)]]
    predictor = Predictor(model=network, num_classes=3, window=(8, 8, 8), mirror=[1])
    together = {case["case"]: predicted.labels for case, predicted in predictor.stream(cases, batch_size=3)}
    assert together.keys() == {case["case"] for case in cases}
    for case in cases:
        assert together[case["case"]].as_tensor().equal(predictor(case).as_tensor())


def test_odd_sizes_are_not_held_back_for_ever():
    """Of an endless stream of sizes that never recur, a few cases are held and the rest is predicted."""
    cases = (case_of(side, 4, 4, name=str(side)) for side in range(2, 1000))
    stream = Predictor(model=two_classes, num_classes=2).stream(cases, batch_size=2)
    assert [case["case"] for case, _ in (next(stream) for _ in range(3))] == ["2", "3", "4"]
    assert next(cases)["case"] == "12"  # eight were waiting, and one came and went per yield


def test_every_submodule_keeps_its_mode():
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Sequential(nn.BatchNorm3d(2), nn.Dropout3d(0.5)))
    network.train()
    network[1][0].eval()  # frozen on purpose
    before = network[1][0].running_mean.clone()
    images = torch.randn(1, 1, 4, 4, 4)
    predictor = Predictor(model=network, num_classes=2)
    probabilities = predictor.probabilities(images)
    assert probabilities.equal(predictor.probabilities(images))  # no dropout
    assert not probabilities.requires_grad
    with pytest.raises(RuntimeError):
        predictor.probabilities(torch.randn(1, 3, 4, 4, 4))  # three channels
    assert [module.training for module in network.modules()] == [True, True, True, False, True]
    assert network[1][0].running_mean.equal(before)


def test_mixed_precision_averages_in_float32():
    images = torch.randn(1, 1, 4, 4, 4)
    seen = []

    def watched(x):
        logits = network(x)
        seen.append(logits.dtype)
        return logits

    network = pointwise()
    half = Predictor(model=watched, num_classes=3, autocast=torch.bfloat16).probabilities(images)
    assert seen == [torch.bfloat16]
    assert half.dtype == torch.float32
    full = Predictor(model=network, num_classes=3).probabilities(images)
    torch.testing.assert_close(half, full, atol=2e-2, rtol=0)  # bfloat16 keeps 8 bits


def test_deep_supervision_counts_by_its_first_output_and_a_sharded_volume_is_gathered():
    logits = [torch.zeros(1, 2, 8, 8, 8), torch.zeros(1, 2, 4, 4, 4)]
    assert full_logits(logits) is logits[0]
    network = DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8], deep_supervision=True, deep_supr_num=1)
    assert Predictor(model=network.train(), num_classes=2)(case_of(8, 8, 8)).shape == (1, 8, 8, 8)
    halves = torch.randn(1, 2, 6, 4, 4).chunk(2, 2)
    assert full_logits(SimpleNamespace(full_tensor=lambda: torch.cat(halves, 2))).equal(torch.cat(halves, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": (8, 8)}, r"window must be three sides in voxels, or None, got \[8, 8\]"),
        ({"overlap": 1.0}, r"overlap must be in \[0, 1\), got 1.0"),
        ({"mirror": [3]}, r"list of the axes 0, 1, 2, got \[3\]"),
        ({"samples_per_pass": 0}, "samples_per_pass must be at least 1, got 0"),
        ({"skip_background": True}, "skip_background needs windows of probabilities, got whole volumes"),
        ({"regions": True}, "needed: a value for each of the 2 outputs"),
        ({"values": (0,)}, "needed: a value for each of the 2 outputs"),
        ({"values": (1, 2, 3), "regions": True}, "needed: a value for each of the 2 outputs"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Predictor(model=two_classes, num_classes=2, **settings)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (two_classes, r"= \(1, 3, 4, 4, 4\) .* background included, got \(1, 2, 4, 4, 4\)"),
        (lambda images: {"logits": images}, "must return logits as a tensor, got dict"),
    ],
)
def test_another_output_is_refused(model, message):
    with pytest.raises(GridError, match=message):
        Predictor(model=model, num_classes=3)(case_of(4, 4, 4))


@pytest.mark.parametrize(
    ("voxel", "weight", "autocast", "remedy"),
    [
        (float("nan"), 1.0, None, "the preprocessed image is not finite either"),
        (1.0, float("nan"), None, "weights may have diverged"),
        (1.0, float("inf"), torch.float16, "float16 may overflow"),
    ],
)
def test_prediction_that_is_not_finite_is_an_error(voxel, weight, autocast, remedy):
    case = case_of(4, 4, 4)
    case["image"][0, 0, 0, 0] = voxel
    with pytest.raises(NonFinitePredictionError, match=f"case knee_7: .*not finite; .*{remedy}"):
        Predictor(model=lambda x: two_classes(x * weight), num_classes=2, autocast=autocast)(case)


def draw_case(shape=(21, 17, 30), spacing=(1.0, 1.2, 0.8)) -> dict:
    affine = torch.diag(torch.tensor([*spacing, 1.0], dtype=torch.float64))
    image = MetaTensor(torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)), affine=affine)
    return build_preprocessing([{"name": "Spacing", "spacing": [1.1, 1.0, 1.0]}])({"case": "ct", "image": image})


class Counting(nn.Module):
    """A network that counts its passes, by thread, and computes each window separately.

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
    (expected,), (found,) = (each.predict([case], also=["entropy", "probabilities"]) for each in (alone, together))
    assert torch.equal(found.labels.affine, expected.labels.affine)
    for name in ("labels", "entropy", "probabilities"):
        assert torch.equal(getattr(found, name).as_tensor(), getattr(expected, name).as_tensor())
    computed = [predictor.model.windows for predictor in together.predictors]
    if count > 1 and "memory" not in settings:
        assert all(0 < len(windows) < len(alone.model.windows) for windows in computed)
        assert len({ident for windows in computed for ident in windows}) <= count


def test_several_devices_predict_case_after_case_and_name_the_one_that_is_not_finite():
    cases = [draw_case((9, 30, 12)), draw_case((5, 6, 7))]  # the last one is less than a window
    alone, together = make(3)
    for found, (_, expected) in zip(together.predict(cases), alone.stream(cases), strict=True):
        assert torch.equal(found.labels.as_tensor(), expected.labels.as_tensor())
    for plane in (0, -1):
        case = draw_case()
        case["image"][0, 3, 3, plane] = float("nan")
        with pytest.raises(NonFinitePredictionError, match="case ct"):
            together.predict([case])
    together.predictors[1].model.layers[0] = nn.Conv3d(2, 4, 3)
    with pytest.raises(RuntimeError, match="channels"):
        together.predict([draw_case()])
    with pytest.raises(ConfigError, match=r"inference\.window is null"):
        make(2, window=None)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [3, 21])
def test_threads_replay_their_recordings_on_gpus(classes):
    """On one GPU too, where both threads have its streams and its memory."""
    torch.manual_seed(0)
    network = DynUNet(3, 1, classes, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32]).eval()
    devices = [torch.device("cuda", number % torch.cuda.device_count()) for number in range(2)]
    settings = {"num_classes": classes, "window": (16, 16, 16), "windows_per_step": 1, "autocast": torch.bfloat16}

    def predict_on(device):
        model = FastKernels(copy.deepcopy(network), device)
        return Predictor(model=record_models([model]), device=device, **settings)

    cases = [draw_case((40, 50, 60)), draw_case((33, 60, 47))]
    alone, together = predict_on(devices[0]), SharedPredictor([predict_on(device) for device in devices])
    for _ in range(2):
        for one, (_, other) in zip(together.predict(cases), alone.stream(cases), strict=True):
            assert torch.equal(one.labels.as_tensor(), other.labels.as_tensor())
    assert all(predictor.models[0].num_recorded for predictor in (alone, *together.predictors))
