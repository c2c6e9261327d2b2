"""MONAI's losses and metrics, told what our fields are."""

import pytest
import torch
from torch.nn.functional import one_hot

from volseg.errors import BatchFieldError, ConfigError
from volseg.workflow.components import LOSSES, METRICS, OPTIMIZERS, build_loss, build_metric


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
    loss = build_loss({"name": name}, inputs=["logits", "label"], output="loss")
    values = [loss({"logits": share * right, "label": label})["loss"] for share in (0.0, 0.5, 1.0)]
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize(
    ("registry", "name"), [(LOSSES, "GlobalMutualInformationLoss"), (METRICS, "ROCAUCMetric"), (OPTIMIZERS, "LBFGS")]
)
def test_what_cannot_work_on_logits_and_label_maps_is_not_offered(registry, name):
    with pytest.raises(ConfigError, match=f"is called '{name}'"):
        registry.check({"name": name})
