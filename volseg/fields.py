"""What passes through volseg by field names: a case, and a batch of patches.

Aliases and not TypedDicts: configs name further fields, and a field is looked up by a name that is a variable.
"""

from typing import Any

__all__ = ["LABEL_FIELDS", "Batch", "Case"]

Case = dict[str, Any]
"""One patient: ``case`` (id), ``image`` and, except for prediction, ``label``.

``image`` and ``label`` are paths until a reader replaces them by MetaTensors ``(C, D, H, W)`` and ``(1, D, H, W)``; an
``image`` in a file per channel is a tuple of paths. ``labelled`` are the values of the label that were looked for,
where these are not all; see `volseg.data.labels`.
"""

Batch = dict[str, Any]
"""Patches that train together: ``image`` (B, C, D, H, W), ``label`` (B, 1, D, H, W) and ``case``, their B ids."""

LABEL_FIELDS = frozenset({"label"})
"""Fields that hold label maps: resampled to the nearest voxel, never normalised, stored as integers."""
