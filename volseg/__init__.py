"""Train 3D medical segmentation networks; several GPUs behave as one large one."""

from volseg.version import __version__

__all__ = ["__version__"]
