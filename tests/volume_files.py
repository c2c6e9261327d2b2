"""One volume in every readable format and any orientation, for tests that compare positions in the patient."""

from itertools import permutations, product
from pathlib import Path

import nibabel
import numpy as np
from nibabel.orientations import axcodes2ornt, inv_ornt_aff
from scipy.spatial.transform import Rotation

CODES = [
    "".join(pair[side] for pair, side in zip(order, sides, strict=True))
    for order in permutations(("LR", "PA", "IS"))
    for sides in product((0, 1), repeat=3)
]


def turn(code: str, spacing, rotation) -> np.ndarray:
    """Return the affine of voxel axes that point to ``code``, and are then turned about the origin."""
    to_ras = inv_ornt_aff(axcodes2ornt(code), (1, 1, 1))
    affine = np.eye(4)
    affine[:3, :3] = rotation @ to_ras[:3, :3] * spacing
    return affine


def tilt(*degrees: float) -> np.ndarray:
    """Return the rotation by so many degrees about each axis of the patient."""
    return Rotation.from_euler("xyz", degrees, degrees=True).as_matrix()


def write_nifti(path: Path, voxels, affine):
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)


def write_itk(path: Path, voxels, affine):
    import SimpleITK  # a machine that only runs GPU tests may lack it

    SimpleITK.WriteImage(itk_image(voxels, affine), str(path))


def write_dicom(path: Path, voxels, affine, **tags):
    import SimpleITK  # a machine that only runs GPU tests may lack it

    path.mkdir()
    image = itk_image(voxels, affine)
    writer = SimpleITK.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    for index in range(image.GetDepth()):
        piece = image[:, :, index : index + 1]
        uid = "1.2.826.0.1.3680043.2.1125.7"
        for tag, value in (("0008|0060", "MR"), ("0020|000e", uid), ("0008|0018", f"{uid}.{index + 1}")):
            piece.SetMetaData(tag, value)
        for tag, value in tags.items():  # such as _0010_0020="P1"
            piece.SetMetaData(tag.strip("_").replace("_", "|"), value)
        # Names against the order of the slices: the reader has to sort by position.
        writer.SetFileName(str(path / f"{image.GetDepth() - index:03d}.dcm"))
        writer.Execute(piece)


def itk_image(voxels, affine):
    import SimpleITK  # a machine that only runs GPU tests may lack it

    lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image = SimpleITK.GetImageFromArray(voxels.T)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    return image


FORMATS = {
    "a.nii": write_nifti,
    "a.nii.gz": write_nifti,
    "a.mha": write_itk,
    "a.nrrd": write_itk,
    "a_dicom": write_dicom,
}
