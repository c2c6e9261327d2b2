"""MONAI's V-Net with every one of its dropouts under a name."""

from monai.networks import nets
from torch import nn

__all__ = ["VNet"]


class VNet(nets.VNet):
    """V-Net whose dropout of the two finest skips can be chosen too.

    MONAI drops channels of the skips at full and half resolution with a probability of 0.5 that none of its parameters
    reaches (1.6.1: ``up_tr64`` and ``up_tr32`` take a default), so its ``dropout_prob_up=(0, 0)`` still leaves a
    network that drops. Everything else, parameters and their names included, is MONAI's.

    Parameters
    ----------
    spatial_dims, in_channels, out_channels, act, dropout_dim, bias
        As for `monai.networks.nets.VNet`.
    dropout_prob_down : float or None
        In the two coarsest transitions down.
    dropout_prob_up : tuple of float
        In the two coarsest transitions up: on what comes from below, and on the skip.
    dropout_prob_fine : float
        On the skips of the two finest transitions up.

    References
    ----------
    .. [1] F. Milletari, N. Navab, S.-A. Ahmadi, "V-Net", 3DV 2016, doi:10.1109/3DV.2016.79. It has no dropout.
    """

    def __init__(
        self,
        spatial_dims: int = 3,
        in_channels: int = 1,
        out_channels: int = 1,
        act: tuple[str, dict] | str = ("elu", {"inplace": True}),
        dropout_prob_down: float | None = 0.5,
        dropout_prob_up: tuple[float | None, float] = (0.5, 0.5),
        dropout_prob_fine: float = 0.5,
        dropout_dim: int = 3,
        bias: bool = False,
    ) -> None:
        super().__init__(
            spatial_dims=spatial_dims,
            in_channels=in_channels,
            out_channels=out_channels,
            act=act,
            dropout_prob_down=dropout_prob_down,
            dropout_prob_up=dropout_prob_up,
            dropout_dim=dropout_dim,
            bias=bias,
        )
        for transition in (self.up_tr64, self.up_tr32):
            for module in transition.modules():
                if isinstance(module, nn.Dropout | nn.Dropout2d | nn.Dropout3d):
                    module.p = dropout_prob_fine
