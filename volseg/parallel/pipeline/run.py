"""The old place of the hooks that a network has once it is placed: networks saved before have them by this name.

It goes with the next release; save such a network again.
"""

from volseg.parallel.pipeline.observe.run import _after, _before

__all__ = ["_after", "_before"]
