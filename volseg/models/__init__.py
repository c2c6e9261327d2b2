"""Build segmentation networks by name, and find the volume sizes that each accepts."""

from volseg.models.fit_grid import FitGrid
from volseg.models.networks import DynUNet, build_network
from volseg.models.residual_encoder import PlainConvUNet, ResEncUNet
from volseg.models.vnet import VNet

__all__ = ["DynUNet", "FitGrid", "PlainConvUNet", "ResEncUNet", "VNet", "build_network"]
