"""Our Dice plus cross entropy against MONAI's: values, gradients, and the cases that MONAI's code computes."""

import copy
from typing import Any

import monai.losses
import pytest
import torch
from monai.losses import DeepSupervisionLoss
from monai.networks import one_hot
from torch import Tensor

from volseg.errors import DataError
from volseg.losses.dice import reference
from volseg.losses.monai import DiceCELoss
from volseg.workflow.components import build_loss

MAPS = {"softmax": True, "to_onehot_y": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without background": {"include_background": False},
    "of the batch": {"batch": True},
    "squared": {"squared_pred": True},
    "Jaccard": {"jaccard": True},
}
VARIANTS["everything"] = {name: value for variant in VARIANTS.values() for name, value in variant.items()}
VARIANTS["everything"] |= {"smooth_nr": 0.3, "smooth_dr": 0.7, "lambda_dice": 0.4, "lambda_ce": 2.5}


def volumes(classes: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    logits = 3 * torch.randn(2, classes, 5, 6, 7, dtype=torch.float64)
    label = torch.randint(0, classes, (2, 1, 5, 6, 7))
    label[0][label[0] == classes - 1] = 0  # a class that one sample lacks
    return logits.requires_grad_(), label.to(dtype)


def assert_same(ours: Tensor, theirs: Tensor, logits: Tensor, **close: float) -> None:
    torch.testing.assert_close(ours, theirs, **close)
    # Not the gradient of 1: a factor from above must arrive.
    gradients = [torch.autograd.grad(3 * loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, **close)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_monais(variant: str, classes: int, dtype: torch.dtype) -> None:
    parameters = {**MAPS, **VARIANTS[variant]}
    logits, label = volumes(classes, dtype)
    ours, theirs = DiceCELoss(**parameters), monai.losses.DiceCELoss(**parameters)
    assert ours.is_fused
    # MONAI takes the norm of the one-hot label, which is float32 whatever the logits are, where it squares.
    close = {"rtol": 1e-7, "atol": 1e-9} if parameters.get("squared_pred") else {"rtol": 1e-12, "atol": 1e-14}
    assert_same(ours(logits, label), theirs(logits, label), logits, **close)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "slice"])
def test_any_layout_and_more_voxels_than_a_chunk(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", 64)
    logits, label = volumes(3)
    given = logits.contiguous(memory_format=torch.channels_last_3d) if layout == "channels last" else logits
    given = torch.cat([given, given], 2)[:, :, 3:8] if layout == "slice" else given
    assert_same(DiceCELoss(**MAPS)(given, label), monai.losses.DiceCELoss(**MAPS)(given, label), logits)


def test_half_precision_is_summed_in_float32() -> None:
    logits, label = volumes(3)
    half = logits.detach().bfloat16().requires_grad_()
    loss = DiceCELoss(**MAPS)(half, label)
    assert loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss, half)
    exact = half.detach().double().requires_grad_()
    expected = monai.losses.DiceCELoss(**MAPS)(exact, label)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    (wanted,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2**-8, atol=1e-8)  # rounded once


@pytest.mark.parametrize(
    "sizes",
    [[(12, 8, 16), (6, 4, 8), (3, 2, 4)], [(12, 8, 18), (4, 8, 6), (4, 2, 2)], [(12, 8, 16), (5, 4, 7)]],
    ids=["halves", "thirds, anisotropic", "no whole number"],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_heads_read_the_voxels_that_monai_takes(sizes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    heads = [torch.randn(2, 3, *size, dtype=torch.float64) for size in sizes]
    heads[1].requires_grad_()
    label = torch.randint(0, 3, (2, 1, *sizes[0]))
    named = build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss")
    loss = named({"logits": heads, "label": label.to(dtype)})["loss"]
    terms = DeepSupervisionLoss(monai.losses.DiceCELoss(**MAPS))
    weights = terms.get_weights(len(heads))
    expected = [w * terms.get_loss(head, label.double()) for w, head in zip(weights, heads, strict=True)]
    assert_same(loss, torch.stack(expected).sum(), heads[1])


@pytest.mark.parametrize(
    "parameters",
    [
        {"weight": torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)},
        {"label_smoothing": 0.1},
        {"reduction": "sum"},
        {"softmax": False, "sigmoid": True},
        {"softmax": False},
    ],
    ids=lambda parameters: next(reversed(parameters)),
)
def test_other_parameters_are_monais(parameters: dict[str, Any]) -> None:
    logits, label = volumes(3)
    ours = DiceCELoss(**{**MAPS, **parameters})
    assert not ours.is_fused
    assert_same(
        ours(logits, label), monai.losses.DiceCELoss(**{**MAPS, **copy.deepcopy(parameters)})(logits, label), logits
    )
    heads = [logits, logits[..., ::2]]  # the last side 7: 4 planes of the label, by MONAI's rule
    named = build_loss({"name": "DiceCELoss", **parameters}, inputs=["logits", "label"], output="loss")
    deep = DeepSupervisionLoss(monai.losses.DiceCELoss(**{**MAPS, **parameters}))
    expected = deep.get_loss(heads[0], label) + 0.5 * deep.get_loss(heads[1], label)
    torch.testing.assert_close(named({"logits": heads, "label": label})["loss"], expected)


def test_images_and_one_hot_labels_are_monais() -> None:
    logits, label = volumes(3)
    loss, theirs = DiceCELoss(**MAPS), monai.losses.DiceCELoss(**MAPS)
    assert_same(loss(logits[..., 0], label[..., 0]), theirs(logits[..., 0], label[..., 0]), logits)
    soft = {"softmax": True}
    target = one_hot(label, 3)
    assert_same(DiceCELoss(**soft)(logits, target), monai.losses.DiceCELoss(**soft)(logits, target), logits)


@pytest.mark.parametrize("stranger", [3, 255, -1, 1.5])
def test_a_label_that_is_no_class_is_refused(stranger: float) -> None:
    logits, label = volumes(3, torch.float32)
    label[1, 0, 2, 3, 4] = stranger
    with pytest.raises(DataError, match=rf"3 classes 0 to 2 of the logits, but also has \[{stranger}"):
        DiceCELoss(**MAPS)(logits, label)


def test_a_label_of_another_grid_or_batch_is_refused() -> None:
    logits, label = volumes(3)
    with pytest.raises(AssertionError, match="different shape"):
        DiceCELoss(**MAPS)(logits, label[..., :6])
    with pytest.raises(DataError, match=r"got \(2, 3, 5, 6, 7\) and \(1, 1, 5, 6, 7\)"):
        DiceCELoss(**MAPS)(logits, label[:1])


def test_nothing_but_logits_and_label_is_kept() -> None:
    logits, label = volumes(3)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        DiceCELoss(**MAPS)(logits, label)
    large = {tensor.data_ptr() for tensor in kept if tensor.numel() >= label.numel()}
    assert large == {logits.data_ptr(), label.data_ptr()}


def test_monais_own_takes_a_softmax_over_regions() -> None:
    """Why ours does not hand regions to it: with ``sigmoid=True`` its Dice is of sigmoids, its cross entropy is not."""
    logits = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    regions = (torch.rand(2, 3, 4, 5, 6) < 0.5).double()
    dice = monai.losses.DiceLoss(sigmoid=True)(logits, regions)
    softmax = torch.nn.functional.cross_entropy(logits, regions)
    torch.testing.assert_close(monai.losses.DiceCELoss(sigmoid=True)(logits, regions), dice + softmax)
