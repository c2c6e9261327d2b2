"""Define the types of a case and of a batch of patches.

They are aliases, not TypedDicts: configs add fields, and code looks up fields by variable names.
"""

from typing import Any

Case = dict[str, Any]
"""One patient: ``case`` (id), ``image`` and, except for prediction, ``label``.

``image`` and ``label`` are paths until a reader replaces them by MetaTensors ``(C, D, H, W)`` and ``(1, D, H, W)``; an
``image`` with one file per channel is a tuple of paths. ``labelled`` lists the label values that were annotated, if
some were not; see `volseg.data.labels`.
"""

Batch = dict[str, Any]
"""Patches that train together: ``image`` (B, C, D, H, W), ``label`` (B, 1, D, H, W) and ``case``, their B ids."""

LABEL_FIELDS = frozenset({"label"})
"""Fields with label maps: resampled to the nearest voxel, never normalised, stored as integers."""
