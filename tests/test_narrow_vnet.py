"""The narrow V-Net is MONAI's but for its width."""

import torch
from monai.networks.nets import VNet
from narrow_vnet import NarrowVNet


def test_the_narrow_vnet_is_monais_but_for_its_width() -> None:
    with torch.device("meta"):
        theirs = VNet(3, 1, 2, dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0))
    ours = NarrowVNet()
    assert [(name, type(part)) for name, part in ours.named_modules()][1:] == [
        (name, type(part)) for name, part in theirs.named_modules()
    ][1:]
    wide = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    for name, tensor in ours.state_dict().items():
        assert all(mine in (theirs, theirs // 8) for mine, theirs in zip(tensor.shape, wide[name], strict=True))
    assert [*wide] == [*ours.state_dict()]
