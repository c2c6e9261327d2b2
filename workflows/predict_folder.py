"""Predict every image of a folder by a trained network, and read what was found.

python workflows/predict_folder.py runs/task04_cpu DIR/imagesTs --output predictions

A run, a cross-validation (all its folds together), a ``model.zip`` of ``volseg export``, or nnU-Net's model folder.
"""

import argparse
from pathlib import Path

import nibabel
import numpy as np

from volseg.experiment import predict


def main() -> None:
    """Write a label map for each image on its own grid, and print the volume of each label."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("source", type=Path, help="what predicts")
    arguments.add_argument("images", nargs="+", type=Path, help="files or folders: NIfTI, DICOM series, MHA, NRRD")
    arguments.add_argument("--output", type=Path, default=Path("predictions"))
    arguments.add_argument(
        "--mirror", action="store_true", help="average over eight mirrorings: slower, a little better"
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
    predicted.require_all()  # an error if one of them failed


if __name__ == "__main__":
    main()
