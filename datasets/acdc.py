"""Convert the cardiac benchmark ACDC, with masks or with scribbles, to the layout of the Decathlon.

pip install h5py
python datasets/acdc.py WSL4MIS/data/ACDC ACDC
python datasets/acdc.py WSL4MIS/data/ACDC ACDCScribbles --scribbles

The source is the folder ``data/ACDC`` of the repository ``HiLab-git/WSL4MIS``: 200 cine MRI volumes of 100 patients, at
the ends of diastole and systole. Fold k of five tests patients 20 k - 19 to 20 k, as that repository does. Cite Bernard
et al., IEEE Transactions on Medical Imaging 37 (2018), 2514, doi:10.1109/TMI.2018.2837502; for the scribbles Valvano et
al., IEEE Transactions on Medical Imaging 40 (2021), 1990, doi:10.1109/TMI.2021.3069634; for their use as here Luo et
al., MICCAI 2022, arXiv:2203.02106. The challenge's data are for research only.

The files store intensities from 0 to 1, and neither spacing nor orientation. The data set has 1.37 to 1.68 mm within
slices and 5 to 10 mm between them: this script writes 1.5625, 1.5625 and 10 mm for all, so distances in mm are nominal.
The axes are taken for left, posterior and superior.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np

SPACING = (1.5625, 1.5625, 10.0)  # mm, nominal
AFFINE = np.diag([-SPACING[0], -SPACING[1], SPACING[2], 1.0])  # LPS to RAS
VOLUMES = "ACDC_training_volumes"
LABELS = {"0": "background", "1": "right ventricle", "2": "myocardium", "3": "left ventricle"}
UNKNOWN = 4
"""The scribbles' value of voxels that nobody labelled."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", type=Path, help=f"the folder that holds {VOLUMES}")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--fold", type=int, choices=range(1, 6), default=5, help="the fold that is tested (5)")
    parser.add_argument("--scribbles", action="store_true", help="train on scribbles; test labels stay masks")
    options = parser.parse_args(arguments)
    convert(options.source, options.output, options.fold, scribbles=options.scribbles)


def convert(source: Path, output: Path, fold: int = 5, *, scribbles: bool = False) -> None:
    """Write a data set in the Decathlon's layout.

    Raises
    ------
    FileNotFoundError
        If the source has no volumes, or none of the fold's patients.
    FileExistsError
        If ``output`` is there.
    """
    files = sorted((source / VOLUMES).glob("patient*.h5"))
    test = [file for file in files if 20 * fold - 19 <= int(file.stem[7:10]) <= 20 * fold]
    training = [file for file in files if file not in test]
    if not test or not training:
        raise FileNotFoundError(f"{source / VOLUMES} needs volumes of patients in and outside of fold {fold}")
    output.mkdir(parents=True)
    for file in training:
        _write_case(file, output / "imagesTr", output / "labelsTr", "scribble" if scribbles else "label")
    for file in test:
        _write_case(file, output / "imagesTs", output / "labelsTs", "label")
    description = {
        "name": "ACDC",
        "description": f"Automated Cardiac Diagnosis Challenge, without patients of fold {fold}",
        "reference": "doi:10.1109/TMI.2018.2837502",
        "licence": "research only",
        "tensorImageSize": "3D",
        "modality": {"0": "MRI"},
        "labels": LABELS,
        **({"ignore": UNKNOWN} if scribbles else {}),
        "numTraining": len(training),
        "numTest": len(test),
        "training": [
            {"image": f"./imagesTr/{file.stem}.nii.gz", "label": f"./labelsTr/{file.stem}.nii.gz"} for file in training
        ],
        "test": [f"./imagesTs/{file.stem}.nii.gz" for file in test],
    }
    (output / "dataset.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _write_case(file: Path, images: Path, labels: Path, field: str) -> None:
    """Write a case's image as float32, and one of its label maps as bytes."""
    import h5py  # no dependency of the framework

    with h5py.File(file, "r") as content:
        volumes = {images: content["image"][:].astype(np.float32), labels: content[field][:].astype(np.uint8)}
    for folder, values in volumes.items():
        folder.mkdir(exist_ok=True)
        image = nib.Nifti1Image(values.transpose(2, 1, 0), AFFINE)
        image.header.set_xyzt_units("mm")
        nib.save(image, folder / f"{file.stem}.nii.gz")


if __name__ == "__main__":
    main()
