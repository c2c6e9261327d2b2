"""Which dim of a volume ``(B, C, D, H, W)`` is which."""

__all__ = ["DIM"]

DIM = 2
"""The dim (D) whose planes lie one behind the other in memory: only cuts along it take the fast ways."""
