"""Predict every image of a folder with a trained network, and measure the volume of each label.

python workflows/predict_folder.py runs/task04_cpu DIR/imagesTs --output predictions

The source is a run, a cross-validation (all its folds), a ``model.zip`` of ``volseg export``, or nnU-Net's folder.
"""

import argparse
from pathlib import Path

import nibabel
import numpy as np

from volseg.experiment import predict


def main() -> None:
    """Write a label map for each image on its own grid, and print the volume of each label."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("source", type=Path, help="run, cross-validation or exported model")
    arguments.add_argument("images", nargs="+", type=Path, help="files or folders: NIfTI, DICOM series, MHA, NRRD")
    arguments.add_argument("--output", type=Path, default=Path("predictions"))
    arguments.add_argument(
        "--mirror", action="store_true", help="average over eight mirrored copies: slower, slightly better"
    )
    given = arguments.parse_args()

    overrides = ["inference.mirror=true"] if given.mirror else []
    predicted = predict(given.source, given.images, given.output, overrides=overrides)
    print(predicted.table())

    for case, path in predicted.label_maps.items():
        label_map = nibabel.load(path)
        millilitres = np.prod(label_map.header.get_zooms()[:3]) / 1000
        values, counts = np.unique(np.asarray(label_map.dataobj), return_counts=True)
        found = ", ".join(
            f"{value}: {count * millilitres:.2f} ml" for value, count in zip(values, counts, strict=True) if value
        )
        print(f"{case}: {found or 'nothing'}")
    predicted.require_all()  # raises if a case failed


if __name__ == "__main__":
    main()
