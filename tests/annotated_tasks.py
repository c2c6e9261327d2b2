"""The synthetic data set with realistic labels: regions, few annotated planes, gaps, partially labelled cases."""

import json
from pathlib import Path

import nibabel
import numpy as np

from volseg.data.synthetic import make_task

NOBODY = 3
"""Value of the planes that nobody annotated: in a sparse annotation, three of four."""

LABELS = {
    "regions": {0: "background", 1: "Anterior", 4: "Posterior"},
    "gaps": {0: "background", 7: "Anterior", 500: "Posterior"},
}
FURTHER = {
    "regions": {"regions": {"Whole": ["Anterior", "Posterior"], "Tail": ["Posterior"]}},
    "sparse": {"ignore": NOBODY},
}


def annotate(label: np.ndarray, annotation: str, number: int) -> np.ndarray:
    """Return what the label file of a case holds, of a label map of 1 and 2."""
    if annotation == "sparse":
        kept = np.arange(len(label)) % 4 == number % 4
        return np.where(kept[:, None, None], label, NOBODY).astype(np.uint8)
    if annotation == "partial":
        return np.where(label == 1 + number % 2, label, 0).astype(np.uint8)
    return np.array([*LABELS[annotation]], dtype=np.uint16 if annotation == "gaps" else np.uint8)[label]


def make_annotated_task(root: Path, annotation: str, *, num_cases: int = 24) -> Path:
    """Write the synthetic task with other labels: ``regions``, ``sparse``, ``partial`` or ``gaps``."""
    root = make_task(root, num_cases=num_cases, num_test=0)
    manifest = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    for number, entry in enumerate(manifest["training"]):
        image = nibabel.Nifti1Image.from_filename(root / entry["label"])
        written = nibabel.Nifti1Image(annotate(np.asarray(image.dataobj), annotation, number), image.affine)
        written.set_sform(*image.get_sform(coded=True))
        written.set_qform(*image.get_qform(coded=True))
        nibabel.save(written, root / entry["label"])
        if annotation == "partial":
            entry["labelled"] = ["Anterior" if number % 2 == 0 else "Posterior"]
    manifest |= FURTHER.get(annotation, {})
    manifest["labels"] = LABELS.get(annotation) or manifest["labels"]
    (root / "dataset.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return root
