import torch
from monai.losses import DeepSupervisionLoss, DiceCELoss, DiceLoss

from volseg.workflow.components import build_loss


def test_heads_are_weighted_as_monai_weights_them():
    label = torch.randint(0, 3, (2, 1, 8, 8, 8))
    heads = [torch.randn(2, 3, side, side, side) for side in (8, 4, 2)]
    named = build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss")
    expected = DeepSupervisionLoss(DiceCELoss(to_onehot_y=True, softmax=True))(heads, label.to(torch.uint8))
    for labels in (label, label.to(torch.uint8)):
        torch.testing.assert_close(named({"logits": heads, "label": labels})["loss"], expected)


def test_what_the_user_says_counts():
    label, logits = torch.randint(0, 3, (2, 1, 8, 8, 8)), torch.randn(2, 3, 8, 8, 8)
    spec = {"name": "DiceLoss", "softmax": False, "sigmoid": True}
    named = build_loss(spec, inputs=["logits", "label"], output="loss")
    expected = DiceLoss(to_onehot_y=True, sigmoid=True)(logits, label)
    assert torch.equal(named({"logits": logits, "label": label})["loss"], expected)
