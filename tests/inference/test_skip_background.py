"""Windows of one value count as background, where that is asked for, and no other window changes."""

import logging

import pytest
import torch
from monai.data import MetaTensor
from torch import nn

from volseg.inference.predictor import Predictor


def body_in_air(*shape: int) -> dict:
    """Return an image with noise in its first half along D, and air of one value around."""
    image = torch.full((1, *shape), -2.0)
    image[:, : shape[0] // 2] = torch.randn(1, shape[0] // 2, *shape[1:])
    return {"case": "ct", "image": MetaTensor(image, affine=torch.eye(4, dtype=torch.float64))}


class Counting(nn.Module):
    """Counts the windows that it sees, and takes air for the last class."""

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
    assert "12 of 28 windows hold one value and count as background (skip_background)" in caplog.text
    assert skipped[:, :16].equal(plain[:, :16])  # no window that reaches there was left out
    assert (plain[:, 20:] == 3 - (not regions)).all()
    assert (skipped[:, 20:] == 0).all()


def test_an_image_of_nothing_but_air_is_background(caplog):
    case = {"case": "air", "image": MetaTensor(torch.ones(2, 9, 9, 9), affine=torch.eye(4, dtype=torch.float64))}
    model = Counting(3)
    labels = Predictor(model=model, num_classes=3, window=(8, 8, 8), skip_background=True)(case)
    assert model.seen == 0
    assert (labels == 0).all()


def test_every_channel_has_to_be_of_one_value():
    image = torch.zeros(2, 8, 8, 8)
    image[1, 3, 3, 3] = 1
    model = Counting(2)
    case = {"case": "mri", "image": MetaTensor(image, affine=torch.eye(4, dtype=torch.float64))}
    Predictor(model=model, num_classes=2, window=(8, 8, 8), skip_background=True)(case)
    assert model.seen == 1
