"""Several devices that behave as one: ``ModelParallel`` and what it is made of.

It imports nothing of volseg but the errors, and works in any PyTorch loop.
"""

from volseg.parallel.model_parallel import ModelParallel

__all__ = ["ModelParallel"]
