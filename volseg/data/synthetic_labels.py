"""The synthetic data set with labels as people have them: regions, few annotated planes, gaps, parts looked for.

The images stay as `volseg.data.synthetic.make_task` wrote them, and so does the anatomy: an anterior (1) and a
posterior structure (2). What changes is what its label files and its manifest say of it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import nibabel
import numpy as np

from volseg.data.synthetic import make_task
from volseg.errors import DataError
from volseg.files import replacing

__all__ = ["Annotation", "make_annotated_task"]

Annotation = Literal["regions", "sparse", "partial", "gaps"]

ANNOTATED_PLANES = 4
"""One plane of so many along the first axis is annotated, in a sparse annotation."""

NOBODY = 3
"""Value of the voxels of the others."""


@dataclass(frozen=True, kw_only=True)
class _Style:
    """How label files and their manifest are written."""

    labels: Mapping[str, Any]
    annotate: Callable[[np.ndarray, int], np.ndarray]
    """From a label map of 1 and 2, and the number of its case, to what its file holds."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Of the manifest."""
    labelled: tuple[tuple[str, ...], ...] = ()
    """What was looked for, in cases in turns."""


def make_annotated_task(root: str | Path, annotation: Annotation, *, num_cases: int = 24, seed: int = 0) -> Path:
    """Write the synthetic task with other labels; the same arguments write the same voxels.

    Parameters
    ----------
    root
        As for `make_task`.
    annotation : {"regions", "sparse", "partial", "gaps"}
        ``regions``: the values 1 and 4, of which the whole structure and its posterior part overlap. ``sparse``: every
        fourth plane is annotated, the others hold a value to ignore. ``partial``: in a case either the anterior or the
        posterior structure was looked for. ``gaps``: the values 7 and 500.
    num_cases, seed
        As for `make_task`.

    Returns
    -------
    Path
        ``root``.

    Raises
    ------
    DataError
        For another annotation, or as `make_task`.
    """
    if annotation not in STYLES:
        raise DataError(f"an annotation is one of {', '.join(get_args(Annotation))}, got {annotation!r}")
    style = STYLES[annotation]
    root = make_task(root, num_cases=num_cases, num_test=0, seed=seed)
    manifest = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    for number, entry in enumerate(manifest["training"]):
        path = root / entry["label"]
        image = nibabel.Nifti1Image.from_filename(path)
        voxels = style.annotate(np.asarray(image.dataobj), number)
        written = nibabel.Nifti1Image(voxels, image.affine)
        written.set_sform(*image.get_sform(coded=True))
        written.set_qform(*image.get_qform(coded=True))
        nibabel.save(written, path)
        if style.labelled:
            entry["labelled"] = list(style.labelled[number % len(style.labelled)])
    manifest |= {"labels": dict(style.labels), **style.further}
    with replacing(root / "dataset.json") as partial:
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return root


def _renumber(*values: int) -> Callable[[np.ndarray, int], np.ndarray]:
    dtype = np.uint8 if max(values) <= 255 else np.uint16
    return lambda label, _: np.array([0, *values], dtype=dtype)[label]


def _annotate_planes(label: np.ndarray, number: int) -> np.ndarray:
    """Keep some planes, which begin elsewhere in each case."""
    kept = np.arange(len(label)) % ANNOTATED_PLANES == number % ANNOTATED_PLANES
    return np.where(kept[:, None, None], label, NOBODY).astype(np.uint8)


def _keep_in_turns(label: np.ndarray, number: int) -> np.ndarray:
    return np.where(label == 1 + number % 2, label, 0).astype(np.uint8)


TWO = {"0": "background", "1": "Anterior", "2": "Posterior"}
STYLES: Mapping[str, _Style] = {
    "regions": _Style(
        labels={"0": "background", "1": "Anterior", "4": "Posterior"},
        annotate=_renumber(1, 4),
        further={"regions": {"Whole": ["Anterior", "Posterior"], "Tail": ["Posterior"]}},
    ),
    "sparse": _Style(labels=TWO, annotate=_annotate_planes, further={"ignore": NOBODY}),
    "partial": _Style(labels=TWO, annotate=_keep_in_turns, labelled=(("Anterior",), ("Posterior",))),
    "gaps": _Style(labels={"0": "background", "7": "Anterior", "500": "Posterior"}, annotate=_renumber(7, 500)),
}
