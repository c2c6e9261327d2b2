"""Which dim of a volume ``(B, C, D, H, W)`` is which."""

from volseg.device.layout import DIM

__all__ = ["DIM"]
