"""Streaming: its memory, its log, its skipped windows, and its strips if memory does not suffice."""

import logging

import pytest
import torch
from monai.data import MetaTensor
from torch import nn

from volseg.errors import ConfigError, NonFinitePredictionError, OutOfMemoryError
from volseg.inference import streaming
from volseg.inference.predictor import Predictor
from volseg.inference.windows import plan_blend

GIB = 2**30
CLASSES = 117
BEYOND = 2**62


def case_of(*shape: int, name: str = "ct_3") -> dict:
    image = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    return {"case": name, "image": MetaTensor(image, affine=torch.eye(4, dtype=torch.float64))}


def classes(num_classes: int):
    """Return a model of logits that differ from class to class."""
    scale = torch.linspace(-3, 3, num_classes).view(1, -1, 1, 1, 1)
    return lambda windows: scale * windows


@pytest.mark.parametrize(
    ("depth", "budget", "strips"),
    [(600, 16, (1, 1, 1)), (1000, 16, (1, 1, 1)), (600, 8, (2, 1, 1)), (600, 4, (2, 2, 1))],
)
def test_what_is_held_of_a_ct_does_not_grow_with_its_length(depth, budget, strips):
    plan = plan_blend((512, 512, depth), (128, 128, 128), 0.5, CLASSES, budget * GIB)
    assert (plan.axis, plan.strips) == (2, strips)
    assert plan.held_bytes(CLASSES) < min(15, budget) * GIB
    with pytest.raises(OutOfMemoryError, match=r"x 512 x \d+ voxels .* 128 x 128 x 128 .* for 117 classes, but 9"):
        plan_blend((512, 512, depth), (128, 128, 128), 0.5, CLASSES, 9)


def test_strips_are_said_in_words(caplog):
    predictor = Predictor(model=classes(5), num_classes=5, window=(8, 8, 8), memory=20_000)
    with caplog.at_level(logging.WARNING, logger=streaming.__name__):
        labels = predictor(case_of(14, 14, 24))
    assert "a layer of windows with 5 classes" in caplog.text
    assert "14 x 14 x 24 voxels" in caplog.text
    assert "windows on their borders are computed twice" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=streaming.__name__):
        plain = Predictor(model=classes(5), num_classes=5, window=(8, 8, 8))(case_of(14, 14, 24))
    assert not caplog.text
    assert labels.as_tensor().equal(plain.as_tensor())


class Scarce(nn.Module):
    """A network on a device with so many free bytes, reported as by CUDA's allocator."""

    def __init__(self, held: list[int], room: int) -> None:
        super().__init__()
        self.held, self.room, self.model = held, room, classes(5)

    def forward(self, windows):
        if self.held[-1] > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return self.model(windows)


@pytest.fixture
def held(monkeypatch) -> list[int]:
    """The memory of the plans, one after another."""
    held: list[int] = []
    plan_blend = streaming.plan_blend

    def planned(*args, **settings):
        plan = plan_blend(*args, **settings)
        held.append(plan.held_bytes(5))
        return plan

    monkeypatch.setattr(streaming, "plan_blend", planned)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return held


def test_a_network_that_takes_more_than_was_guessed_gets_it_from_the_blend(held, caplog):
    case = case_of(14, 14, 24)
    with caplog.at_level(logging.WARNING, logger=streaming.__name__):
        labels = Predictor(model=Scarce(held, 20_000), num_classes=5, window=(8, 8, 8))(case)
    assert "CUDA out of memory. Tried to allocate 1.00 GiB. Trying again" in caplog.text
    assert labels.as_tensor().equal(Predictor(model=classes(5), num_classes=5, window=(8, 8, 8))(case).as_tensor())


def test_a_window_that_does_not_fit_by_itself_is_refused_in_words(held):
    with pytest.raises(OutOfMemoryError, match=r"8 x 8 x 8 voxels do not fit on cpu, .* choose a smaller window"):
        Predictor(model=Scarce(held, 0), num_classes=5, window=(8, 8, 8))(case_of(14, 14, 24))


@pytest.mark.parametrize("memory", [None, 8_000])
@pytest.mark.parametrize("settings", [{}, {"values": (1, 2, 3, 4, 5), "regions": True}])
@pytest.mark.parametrize("window", [None, (8, 8, 8)])
def test_one_voxel_that_is_not_finite_is_found_wherever_it_lies(memory, settings, window):
    predictor = Predictor(model=classes(5), num_classes=5, window=window, memory=memory, **settings)
    for voxel in ((0, 0, 0), (11, 7, 15), (6, 11, 9)):
        case = case_of(12, 12, 16)
        case["image"][0, *voxel] = float("nan")
        with pytest.raises(NonFinitePredictionError, match=r"case ct_3: .* the preprocessed image is not finite"):
            predictor(case)


def test_small_volumes_are_blended_together_and_large_ones_one_by_one(monkeypatch):
    batches = []
    blend_slabs = streaming.blend_slabs

    def watched(step, images, *args, **settings):
        batches.append(len(images))
        return blend_slabs(step, images, *args, **settings)

    monkeypatch.setattr(streaming, "blend_slabs", watched)
    cases = [case_of(9, 9, 9, name=str(number)) for number in range(3)]
    predictor = Predictor(model=classes(2), num_classes=2, window=(8, 8, 8))
    together = [prediction.labels.as_tensor() for _, prediction in predictor.stream(cases, batch_size=3)]
    assert batches == [3]
    monkeypatch.setattr(streaming, "HELD_WHOLE_BYTES", 2 * 9**3 * 3 * 4)
    again = [prediction.labels.as_tensor() for _, prediction in predictor.stream(cases, batch_size=3)]
    assert batches == [3, 2, 1]
    for one, other in zip(together, again, strict=True):
        assert one.equal(other)


def test_entropy_is_0_where_sure_and_1_where_all_classes_are_alike():
    case = case_of(4, 4, 4)
    case["image"][0] = 0
    case["image"][0, 0] = 100
    ((_, prediction),) = Predictor(model=classes(4), num_classes=4).stream([case], also=["entropy"])
    assert prediction.probabilities is None
    assert prediction.entropy.shape == (1, 4, 4, 4)
    torch.testing.assert_close(prediction.entropy.as_tensor()[0, 1:], torch.ones(3, 4, 4), atol=1e-6, rtol=0)
    assert (prediction.entropy[0, 0] < 1e-6).all()
    with pytest.raises(ConfigError, match=r"also have entropy and probabilities, but not \['logits'\]"):
        next(Predictor(model=classes(4), num_classes=4).stream([case], also=["logits"]))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(32, 32, 32), (64, 64, 64)])
def test_a_gpu_holds_what_was_planned(window):
    """Many classes, for which the plain way would need 40 times the memory."""
    shape, num_classes = (96, 96, 1200), 100
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = nn.Conv3d(1, num_classes, 1).cuda()
    settings = {"num_classes": num_classes, "window": window, "windows_per_step": 1, "autocast": torch.bfloat16}
    labels = Predictor(model=model, **settings)(case_of(*shape))
    assert labels.device.type == "cpu"
    plan = plan_blend(shape, window, 0.5, num_classes, BEYOND)
    a_window = window[0] ** 3 * num_classes * 4
    image = 1200 * 96 * 96 * 4
    assert torch.cuda.max_memory_allocated() - before < plan.held_bytes(num_classes) + 4 * a_window + 4 * image


@pytest.mark.gpu
@pytest.mark.parametrize("spacing", [1.0, 0.8])
@pytest.mark.parametrize("mirror", [False, True])
def test_a_gpu_decides_as_a_cpu_does(spacing, mirror):
    case = case_of(40, 33, 70)
    case["image"].meta["spatial_shape"] = tuple(int(side / spacing) for side in (40, 33, 70))
    case["image"].meta["original_affine"] = torch.diag(torch.tensor([spacing] * 3 + [1.0], dtype=torch.float64))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.LeakyReLU(), nn.Conv3d(8, 20, 1))
    maps = []
    for device, memory in (("cpu", None), ("cuda", None), ("cuda", 2_000_000), ("cuda", 500_000)):
        predictor = Predictor(model=model.to(device), num_classes=20, window=(16, 16, 16), mirror=mirror, memory=memory)
        maps.append(predictor(case).as_tensor())
    # Convolutions round otherwise on a GPU; a voxel whose two best classes are alike may change.
    assert (maps[0] != maps[1]).float().mean() < 1e-4
    assert maps[1].equal(maps[2])
    assert maps[1].equal(maps[3])


def body_in_air(*shape: int) -> dict:
    """Return an image with noise in its first half along D, and air of one value around."""
    image = torch.full((1, *shape), -2.0)
    image[:, : shape[0] // 2] = torch.randn(1, shape[0] // 2, *shape[1:])
    return {"case": "ct", "image": MetaTensor(image, affine=torch.eye(4, dtype=torch.float64))}


class Counting(nn.Module):
    """Counts its windows, and labels air as the last class."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes, self.seen = classes, 0

    def forward(self, windows):
        self.seen += len(windows)
        logits = torch.zeros(len(windows), self.classes, *windows.shape[2:])
        logits[:, -1] = torch.where(windows[:, 0] == -2, 9.0, -9.0)
        logits[:, 0] = windows[:, 0]
        return logits


@pytest.mark.parametrize("windows_per_step", [1, 4])
@pytest.mark.parametrize("regions", [False, True])
def test_windows_of_air_go_through_no_model_and_are_background(windows_per_step, regions, caplog):
    case = body_in_air(32, 12, 10)
    settings = {
        "num_classes": 3,
        "values": [1, 2, 3] if regions else None,
        "regions": regions,
        "window": (8, 8, 8),
        "windows_per_step": windows_per_step,
    }
    every, some = Counting(3), Counting(3)
    plain = Predictor(model=every, **settings)(case)
    assert not caplog.records
    with caplog.at_level(logging.INFO):
        skipped = Predictor(model=some, skip_background=True, **settings)(case)
    # 7 windows along D begin at 0, 4 ... 24; those from plane 16 on see air alone. 2 x 2 of each.
    assert (every.seen, some.seen) == (28, 16)
    assert "12 of 28 windows have one value and count as background (skip_background)" in caplog.text
    assert skipped[:, :16].equal(plain[:, :16])  # no window that reaches there was left out
    assert (plain[:, 20:] == 3 - (not regions)).all()
    assert (skipped[:, 20:] == 0).all()


def test_air_alone_is_background_and_every_channel_has_to_be_of_one_value():
    image, model = MetaTensor(torch.ones(2, 9, 9, 9), affine=torch.eye(4, dtype=torch.float64)), Counting(3)
    predictor = Predictor(model=model, num_classes=3, window=(8, 8, 8), skip_background=True)
    assert (predictor({"case": "air", "image": image}) == 0).all()
    assert model.seen == 0
    image[1, 0, 0, 0] = 2  # in the first window of eight
    predictor({"case": "mri", "image": image})
    assert model.seen == 1
