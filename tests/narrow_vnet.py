"""MONAI's V-Net, an eighth as wide, because its width is not a parameter.

With its 46 million parameters each comparison in float64 took half a minute, through the same layers.
`equivalence/test_benchmarked_networks.py` checks that nothing else differs.
"""

from monai.networks.nets import VNet
from monai.networks.nets.vnet import DownTransition, InputTransition, OutputTransition, UpTransition
from torch import nn

from volseg.models.topology import Topology
from volseg.models.vnet import reshape_levels


class NarrowVNet(VNet):
    """MONAI's blocks and forward, without dropout, which MONAI cannot switch off in the finest levels.

    A topology sets the kernels and strides of its levels, as in `VNet`.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        nn.Module.__init__(self)
        elu, width, none = ("elu", {"inplace": True}), 2, (0.0, 0.0)
        self.in_tr = InputTransition(3, 1, width, elu)
        self.down_tr32 = DownTransition(3, width, 1, elu)
        self.down_tr64 = DownTransition(3, 2 * width, 2, elu)
        self.down_tr128 = DownTransition(3, 4 * width, 3, elu, dropout_prob=0.0)
        self.down_tr256 = DownTransition(3, 8 * width, 2, elu, dropout_prob=0.0)
        self.up_tr256 = UpTransition(3, 16 * width, 16 * width, 2, elu, dropout_prob=none)
        self.up_tr128 = UpTransition(3, 16 * width, 8 * width, 2, elu, dropout_prob=none)
        self.up_tr64 = UpTransition(3, 8 * width, 4 * width, 1, elu)
        self.up_tr32 = UpTransition(3, 4 * width, 2 * width, 1, elu)
        self.out_tr = OutputTransition(3, 2 * width, 2, elu)
        for module in self.modules():
            if isinstance(module, nn.Dropout3d):
                module.p = 0.0
        if topology is not None:
            reshape_levels(self, topology.strides, topology.kernels)
