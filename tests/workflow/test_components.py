"""MONAI's losses and metrics with our fields."""

import monai.losses
import pytest
import torch
from monai.losses import DeepSupervisionLoss
from torch.nn.functional import one_hot

from volseg.errors import BatchFieldError, ConfigError
from volseg.losses import Targets
from volseg.workflow.components import LOSSES, METRICS, OPTIMIZERS, OVERLAPPING, build_loss, build_metric
from volseg.workflow.named import Objective


@pytest.fixture
def label_maps():
    prediction, label = torch.zeros(2, 1, 1, 12, 12, 12, dtype=torch.uint8)
    prediction[..., 2:6, 2:6, 2:6], prediction[..., 6:9, 2:6, 2:6] = 1, 2
    label[..., 3:7, 2:6, 2:6], label[..., 7:9, 2:6, 2:6] = 1, 2
    return {"pred": prediction, "label": label.float(), "spacing": [3.0, 1.0, 1.0]}


def metric(name, **parameters):
    return build_metric({"name": name, **parameters}, inputs=["pred", "label"], output="x", num_classes=3)


@pytest.mark.parametrize(("name", "expected"), [("DiceMetric", [0.75, 0.8]), ("MeanIoU", [0.6, 2 / 3])])
def test_an_overlap_is_that_of_each_foreground_label(label_maps, name, expected):
    """MONAI's MeanIoU of label maps, not one-hot, is 2.6 here and no error."""
    torch.testing.assert_close(metric(name)(label_maps)["x"], torch.tensor([expected]))
    gaps = {**label_maps, **{key: torch.tensor([0, 7, 500])[label_maps[key].long()] for key in ("pred", "label")}}
    of_values = build_metric({"name": name}, inputs=["pred", "label"], output="x", columns=[(0,), (7,), (500,)])
    torch.testing.assert_close(of_values(gaps)["x"], torch.tensor([expected]))


@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")  # MONAI 1.6 warns of itself
def test_a_distance_is_in_millimetres(label_maps):
    torch.testing.assert_close(metric("HausdorffDistanceMetric")(label_maps)["x"], torch.tensor([[3.0, 3.0]]))
    within = metric("SurfaceDiceMetric", class_thresholds=[2.9, 3.1])(label_maps)["x"]
    assert within[0, 0] < 1
    assert within[0, 1] == 1
    with pytest.raises(BatchFieldError, match="spacing"):
        metric("HausdorffDistanceMetric")({name: label_maps[name] for name in ("pred", "label")})


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_falls_when_logits_become_right(name):
    label = torch.randint(0, 3, (2, 1, 8, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    right = 6 * one_hot(label[:, 0].long(), 3).movedim(-1, 1).float()
    loss = loss_of(None, name)
    values = [loss({"logits": share * right, "label": label})["loss"] for share in (0.0, 0.5, 1.0)]
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize(
    ("registry", "name"), [(LOSSES, "GlobalMutualInformationLoss"), (METRICS, "ROCAUCMetric"), (OPTIMIZERS, "LBFGS")]
)
def test_what_cannot_work_on_logits_and_label_maps_is_not_offered(registry, name):
    with pytest.raises(ConfigError, match=f"is called '{name}'"):
        registry.check({"name": name})


BOTH, WEIGHTED = {"softmax": True, "to_onehot_y": True}, {"weight": [0.5, 1.0, 3.0]}


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("DiceCELoss", {}, BOTH),
        ("DiceCELoss", WEIGHTED, BOTH),
        ("DiceLoss", WEIGHTED, BOTH),
        ("DiceLoss", {"softmax": False, "sigmoid": True}, {"to_onehot_y": True, "sigmoid": True}),
        ("FocalLoss", WEIGHTED, {"use_softmax": True, "to_onehot_y": True}),
        ("DiceFocalLoss", WEIGHTED, BOTH),
    ],
)
def test_a_loss_is_monais_of_what_the_config_says(name, given, expected, heads):
    """Also with deep supervision, and with class weights, which move to the device."""
    label = torch.randint(0, 3, (2, 1, 8, 8, 8))
    logits = [torch.randn(2, 3, side, side, side) for side in (8, 4, 2)[:heads]]
    weights = {key: torch.tensor(value) for key, value in given.items() if key == "weight"}
    theirs = DeepSupervisionLoss(getattr(monai.losses, name)(**expected, **weights))(logits, label.float())
    loss = loss_of(None, name, **given)
    for labels in (label, label.to(torch.uint8)):
        torch.testing.assert_close(compute(loss, logits, labels)[0].detach(), theirs)
    buffers = [*Objective(loss).to(torch.device("meta")).losses[0].buffers()]
    assert all(buffer.is_meta for buffer in buffers)
    assert bool(buffers) == bool(weights)


REGIONS = Targets(num_classes=4, regions=((1, 2, 3), (2, 3), (3,)))
SPARSE = Targets(num_classes=4, ignores=True)
PARTIAL = Targets(num_classes=4, hidden=((0, 2, 3),))


def loss_of(targets, name="DiceCELoss", **parameters):
    return build_loss({"name": name, **parameters}, inputs=["logits", "label"], output="loss", targets=targets)


def compute(loss, logits, label):
    logits = [head.detach().requires_grad_() for head in (logits if isinstance(logits, list) else [logits])]
    value = loss({"logits": logits if len(logits) > 1 else logits[0], "label": label})["loss"]
    return value, torch.autograd.grad(value, logits)


@pytest.mark.parametrize("parameters", [{}, {"sigmoid": True}, {"include_background": False}])
@pytest.mark.parametrize("name", ["DiceCELoss", *OVERLAPPING])
def test_regions_need_no_word_in_the_config(name, parameters):
    """Other settings have no effect: no other activation, and no background among the outputs."""
    parameters = {key: value for key, value in parameters.items() if LOSSES.accepts(name, key)}
    label = torch.randint(0, 4, (2, 1, 8, 8, 8), dtype=torch.uint8)
    right = (
        8 * torch.stack([torch.isin(label[:, 0], torch.tensor(region)) for region in REGIONS.regions], 1).float() - 4
    )
    values = [compute(loss_of(REGIONS, name, **parameters), share * right, label) for share in (0.0, 0.5, 1.0)]
    assert values[0][0] > values[1][0] > values[2][0]
    torch.testing.assert_close(values[1], compute(loss_of(REGIONS, name), 0.5 * right, label), rtol=0, atol=0)
    assert all(values[0][1][0][:, region].abs().sum() > 0 for region in range(3))


@pytest.mark.parametrize("targets", [REGIONS, SPARSE, PARTIAL], ids=["regions", "sparse", "partial"])
def test_deep_supervision_weighs_the_heads(targets):
    sides = (8, 4, 2)
    heads = [torch.randn(2, targets.num_outputs, side, side, side) for side in sides]
    label = torch.randint(0, targets.num_classes, (2, 1, 8, 8, 8), dtype=torch.uint8)
    label[:, :, :3] = targets.num_indices - 1
    loss = loss_of(targets)
    coarse = [label[..., n // 2 :: n, n // 2 :: n, n // 2 :: n] for n in (1, 2, 4)]
    alone = [compute(loss, head, part)[0] for head, part in zip(heads, coarse, strict=True)]
    value, gradients = compute(loss, heads, label)
    torch.testing.assert_close(value, alone[0] + alone[1] / 2 + alone[2] / 4)
    assert len(gradients) == 3


@pytest.mark.parametrize(
    ("targets", "name", "parameters", "match"),
    [
        (REGIONS, "GeneralizedDiceFocalLoss", {}, r"does not support label maps with regions; use DiceCELoss"),
        (SPARSE, "DiceLoss", {}, "label maps with ignored voxels"),
        (PARTIAL, "TverskyLoss", {}, "label maps with hidden classes"),
        (REGIONS, "DiceLoss", {"softmax": True}, "has softmax: true, but regions overlap"),
        (REGIONS, "DiceCELoss", {"softmax": True}, "has softmax: true, but regions overlap"),
        (SPARSE, "DiceCELoss", {"label_smoothing": 0.1}, "supports no class weights, no label smoothing"),
    ],
)
def test_a_loss_that_would_be_wrong_is_refused(targets, name, parameters, match):
    with pytest.raises(ConfigError, match=match):
        loss_of(targets, name, **parameters)


def test_a_number_that_means_nothing_to_regions_makes_the_loss_nan():
    label = torch.full((1, 1, 4, 4, 4), 4, dtype=torch.uint8)
    assert compute(loss_of(REGIONS, "DiceLoss"), torch.zeros(1, 3, 4, 4, 4), label)[0].isnan()


def test_a_metric_of_regions_counts_each_of_them():
    prediction = torch.tensor([1, 2, 4, 0, 0]).view(1, 1, 1, 1, 5)
    label = torch.tensor([1, 1, 4, 4, 0]).view(1, 1, 1, 1, 5)
    dice = build_metric({"name": "DiceMetric"}, inputs=["pred", "label"], output="x", columns=[(1, 2, 4), (2, 4), (4,)])
    expected = torch.tensor([[2 * 3 / 7, 2 * 1 / 4, 2 * 1 / 3]])
    torch.testing.assert_close(dice({"pred": prediction, "label": label})["x"], expected)
    with pytest.raises(ConfigError, match="skips the first column"):
        build_metric(
            {"name": "DiceMetric", "include_background": False}, inputs=["pred", "label"], output="x", columns=[(1, 2)]
        )
