"""The old place of ``CapturedStep``."""

from volseg.parallel.sharding import moved

__getattr__ = moved(__name__, dict.fromkeys(["CapturedStep"], "volseg.parallel"))
