"""Convert the left atrium benchmark's h5 files to the layout of the Medical Segmentation Decathlon.

pip install h5py
python datasets/left_atrium.py UA-MT/data LeftAtrium
python datasets/left_atrium.py UA-MT/data LeftAtrium16 --labelled 16

The source is the folder ``data`` of the repository ``yulequan/UA-MT``: 100 cropped scans of the Atrial Segmentation
Challenge 2018 (gadolinium-enhanced MRI), ``train.list`` (80 cases) and ``test.list`` (20). The repository states no
licence for them. Cite Xiong et al., Medical Image Analysis 67 (2021), 101832, doi:10.1016/j.media.2020.101832, and for
the split Yu et al., MICCAI 2019, doi:10.1007/978-3-030-32245-8_67.

``imagesTr`` and ``labelsTr`` hold the labelled cases, ``unlabelled`` the images of the other cases of ``train.list``,
``imagesTs`` and ``labelsTs`` the test cases. The stored images are z-scores of grey values 0 to 255. Their smallest
difference is the scale, and the images are written as grey values above the smallest (unsigned bytes). Voxels are cubes
of 0.625 mm. The files do not store an orientation: the axes are taken for left, posterior and superior, as in the
challenge's NRRD files.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

SPACING = 0.625  # mm, the challenge's page
AFFINE = np.diag([-SPACING, -SPACING, SPACING, 1.0])  # LPS to RAS
SCANS = "2018LA_Seg_Training Set"
TOLERANCE = 0.02  # of a grey value: rounding of float32


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert the lists of cases that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", type=Path, help="the folder that holds train.list and test.list")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--labelled", type=int, default=80, help="training cases with a label, in the list's order")
    options = parser.parse_args(arguments)
    convert(options.source, options.output, options.labelled)


def convert(source: Path, output: Path, labelled: int = 80) -> None:
    """Write a data set in the Decathlon's layout.

    Raises
    ------
    FileExistsError
        If ``output`` is there.
    ValueError
        If ``labelled`` is not among the training cases, or an image has no grey values.
    """
    training, test = _read_list(source / "train.list"), _read_list(source / "test.list")
    if not 1 <= labelled <= len(training):
        raise ValueError(f"--labelled {labelled} is not between 1 and {len(training)}, the cases of train.list")
    output.mkdir(parents=True)
    for case in training[:labelled]:
        _write_case(source, case, output / "imagesTr", output / "labelsTr")
    for case in training[labelled:]:
        _write_case(source, case, output / "unlabelled")
    for case in test:
        _write_case(source, case, output / "imagesTs", output / "labelsTs")
    description = {
        "name": "LeftAtrium",
        "description": "Left atrium of the Atrial Segmentation Challenge 2018, cropped, split of UA-MT",
        "reference": "doi:10.1016/j.media.2020.101832",
        "licence": "none stated",
        "tensorImageSize": "3D",
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "left atrium"},
        "numTraining": labelled,
        "numTest": len(test),
        "training": [
            {"image": f"./imagesTr/{case}.nii.gz", "label": f"./labelsTr/{case}.nii.gz"} for case in training[:labelled]
        ],
        "test": [f"./imagesTs/{case}.nii.gz" for case in test],
    }
    (output / "dataset.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def grey_values(image: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the grey values of a z-scored image ``(W, H, D)``, counted from its smallest."""
    levels, places = np.unique(image.astype(np.float64), return_inverse=True)
    steps = np.diff(levels)
    if not len(steps):
        raise ValueError("the image has one value everywhere, and no scale follows from it")
    rough = steps.min()
    exact = (levels[-1] - levels[0]) / np.round((levels[-1] - levels[0]) / rough)
    values = (levels - levels[0]) / exact
    if (error := np.abs(values - np.round(values)).max()) > TOLERANCE or values[-1] > 255.5:
        raise ValueError(
            f"values of the image are up to {error:.3f} from whole grey values, and reach {values[-1]:.0f}; the file "
            "holds no z-scored image of 8 bits"
        )
    return np.round(values).astype(np.uint8)[places].reshape(image.shape)


def _write_case(source: Path, case: str, images: Path, labels: Path | None = None) -> None:
    """Write a case's image, and its label where a folder is given."""
    import h5py  # no dependency of the framework

    with h5py.File(source / SCANS / case / "mri_norm2.h5", "r") as file:
        image, label = file["image"][:], file["label"][:]
    try:
        grey = grey_values(image)
    except ValueError as error:
        raise ValueError(f"{case}: {error}") from error
    _save(grey, images / f"{case}.nii.gz")
    if labels is not None:
        _save(label.astype(np.uint8), labels / f"{case}.nii.gz")


def _save(values: NDArray[np.uint8], path: Path) -> None:
    """Write a volume of bytes as NIfTI."""
    path.parent.mkdir(exist_ok=True)
    image = nib.Nifti1Image(values, AFFINE)
    image.header.set_xyzt_units("mm")
    nib.save(image, path)


def _read_list(path: Path) -> list[str]:
    """Return the cases of a list, one in each line."""
    return path.read_text(encoding="utf-8").split()


if __name__ == "__main__":
    main()
