"""Build segmentation networks by name, and find the volume sizes that each accepts."""

from volseg.models.networks import DynUNet, build_network
from volseg.models.residual_encoder import PlainConvUNet, ResEncUNet
from volseg.models.vnet import VNet

__all__ = ["DynUNet", "PlainConvUNet", "ResEncUNet", "VNet", "build_network"]
