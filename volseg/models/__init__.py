"""Build segmentation networks by name, and find the volume sizes that each accepts."""

from volseg.models.fit_grid import FitGrid
from volseg.models.grids import GridRule, grid_divisors, grid_rule
from volseg.models.networks import NETWORKS, DynUNet, build_network, complete_spec
from volseg.models.residual_encoder import PlainConvUNet, ResEncUNet
from volseg.models.topology import Topology, plan_topology
from volseg.models.vnet import VNet

__all__ = [
    "NETWORKS",
    "DynUNet",
    "FitGrid",
    "GridRule",
    "PlainConvUNet",
    "ResEncUNet",
    "Topology",
    "VNet",
    "build_network",
    "complete_spec",
    "grid_divisors",
    "grid_rule",
    "plan_topology",
]
