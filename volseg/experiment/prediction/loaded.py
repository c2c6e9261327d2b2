"""A trained model that stays in memory: loaded once, called with images in memory or in files.

| given | label map |
| --- | --- |
| a path, or one per channel; a volume of `volseg.read_volume` | volume (1, D, H, W) with affine |
| an array or a tensor with an affine | array or tensor (D, H, W) |
| an image of nibabel | NIfTI image, as `write_prediction` writes it |
| an image of SimpleITK | image of SimpleITK |
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Task
from volseg.data.checks.kinds import KINDS
from volseg.data.checks.volumes import check_grid, check_image_voxels
from volseg.data.itk import image_affine, image_voxels, simpleitk
from volseg.data.labels import measure_volumes
from volseg.data.nifti import convert_nifti
from volseg.data.readers import read_volume
from volseg.data.volume import as_volume
from volseg.errors import ConfigError, DataError
from volseg.experiment.cases import find_previous_stage
from volseg.experiment.placement.alternatives import explaining_memory
from volseg.experiment.prediction.sources import Source, load_trained, path_of
from volseg.experiment.prediction.trained import Trained
from volseg.inference.prefetching import prepare_on
from volseg.inference.writing import build_label_image
from volseg.parallel.devices import list_gpus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Segmentation:
    """Result of a model for one image."""

    labels: Any
    """Label map on the image's grid, of the image's kind; see `LoadedModel`."""
    names: dict[int, str]
    """Name of each value, without the background."""
    volumes: dict[str, float]
    """Volume of each label or region (ml)."""
    probabilities: MetaTensor | None = None
    """(K, D, H, W) float32 on the image's grid, if requested."""
    outputs: tuple[str, ...] = ()
    """Names of the K outputs."""


class LoadedModel:
    """Networks that stay on their device; called with an image, they return its `Segmentation`.

    The numbers equal those of ``volseg predict``, to the bit. Several threads may call one model: a lock lets one call
    compute at a time.

    Parameters
    ----------
    trained : Trained
        The networks, and the other parts of a prediction.
    postprocessing : bool
        Apply the measured steps of `volseg postprocess`, if there are any.
    """

    def __init__(self, trained: Trained, *, postprocessing: bool = True) -> None:
        self._trained, self._lock = trained, Lock()
        self._predictor = trained.build_predictor()
        self._postprocessing = trained.postprocessing if postprocessing else None
        stage = find_previous_stage(trained.config)
        on_device = [f"device={trained.config.device}"]
        self._previous = None if stage is None else load(stage, overrides=on_device, postprocessing=False)

    @property
    def task(self) -> Task:
        """Required channels of an image, labels and regions."""
        return self._trained.task

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        return torch.device(self._predictor.device or "cpu")

    def __call__(self, volume: Any, affine: Any = None, *, probabilities: bool = False) -> Segmentation:
        """Return the segmentation of an image.

        Parameters
        ----------
        volume : path, sequence of paths, MetaTensor, array, Tensor, or image of nibabel or SimpleITK
            The image; see `to_volume`.
        affine : array, optional
            Affine of an array or a tensor: 4 x 4, voxel index to RAS+ position (mm).
        probabilities : bool
            Also return probabilities, K times the image's voxels in float32.

        Raises
        ------
        DataError
            If the image cannot be read, has other channels than the task, or has values that are not finite.
        OutOfMemoryError
            If the image does not fit the device.
        """
        image = to_volume(volume, affine)
        self._require_sound(image)
        case: dict[str, Any] = {"case": str(image.meta.get("filename_or_obj", "image")), "image": image}
        if self._previous is not None:
            case["stage"] = self._previous(image).labels
        config, device, preprocessing = self._trained.config, self.device, self._trained.preprocessing
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with self._lock, on_device, explaining_memory(config):
            prepared = prepare_on(device, case, preprocessing)
            (predicted,) = self._predictor.predict([prepared], also=["probabilities"] if probabilities else [])
            labels = predicted.labels.cpu()
        if self._postprocessing is not None:
            labels = self._postprocessing(labels)
        task = self.task
        return Segmentation(
            labels=as_kind_of(volume, labels, image, task.value_names),
            names=task.foreground,
            volumes=measure_volumes(labels, task),
            probabilities=predicted.probabilities,
            outputs=tuple(task.regions) or tuple(task.labels[value] for value in task.class_values),
        )

    def _require_sound(self, image: MetaTensor) -> None:
        """Raise all faults for which ``volseg predict`` refuses an image; warn of the others."""
        faults = [*check_grid(image), *check_image_voxels(image, self.task)]
        name = image.meta.get("filename_or_obj", "the image")
        if bad := [fault.text for fault in faults if KINDS[fault.kind].severity == "bad"]:
            raise DataError(f"{name} {'; '.join(bad)}")
        for fault in faults:
            kind = KINDS[fault.kind]
            logger.warning("%s: %s (%s): %s", name, kind.says, fault.text, kind.remedy)


def load(
    source: Source | Sequence[Source],
    *,
    device: str | torch.device | None = None,
    mirror: bool | None = None,
    folds: Sequence[int | str] | None = None,
    checkpoint: str = "latest",
    overrides: Sequence[str] = (),
    postprocessing: bool = True,
) -> LoadedModel:
    """Load a trained model once, to segment many images in this process.

    Parameters
    ----------
    source : path, RunFolder, or sequence of them
        A run, a cross-validation, ``model.zip``, a model folder of nnU-Net 2 or a checkpoint from it; see
        `volseg.experiment.prediction.sources.open_source`. The probabilities of several networks are averaged.
    device : str or torch.device, optional
        ``auto``, ``cpu``, ``cuda``, or one GPU: ``cuda:1``; the training config's device by default.
    mirror : bool, optional
        Average over mirrorings; the training config's setting by default.
    folds : sequence of int, optional
        Folds of a cross-validation, an archive or a model folder to use.
    checkpoint : str
        ``latest``, ``best`` or ``previous``.
    overrides : sequence of str
        Further settings, such as ``inference.overlap=0.25``.
    postprocessing : bool
        Apply the measured steps of `volseg postprocess`, if there are any.

    Returns
    -------
    LoadedModel
        Callable with an image; returns the image's `Segmentation`.

    Raises
    ------
    ConfigError
        If the source cannot predict, or there is no such device or fold.
    CheckpointError
        If weights are absent or damaged.

    Examples
    --------
    >>> model = volseg.load("runs/task04_unet", device="cuda")  # doctest: +SKIP
    >>> found = model("scan.nii.gz")  # doctest: +SKIP
    >>> found.volumes  # doctest: +SKIP
    {'Anterior': 1.62, 'Posterior': 1.41}
    """
    device = None if device is None else str(device)
    if folds is not None:
        if not isinstance(source, Source) or not folds:
            raise ConfigError(f"folds must name folds of one source, got {folds!r} of {source}")
        source = [path_of(source) / f"fold_{fold}" for fold in folds]
    settings = [*overrides] if device is None else [*overrides, f"device={device.partition(':')[0]}"]
    if mirror is not None:
        settings.append(f"inference.mirror={str(mirror).lower()}")
    with _choose_gpu(device):
        return LoadedModel(load_trained(source, checkpoint, settings), postprocessing=postprocessing)


def _choose_gpu(device: str | None) -> Any:
    """Return a context in which networks are placed on the named GPU."""
    if device is None or ":" not in device:
        return nullcontext()
    number, count = device.partition(":")[2], len(list_gpus())
    if not device.startswith("cuda:") or not number.isdecimal() or int(number) >= count:
        raise ConfigError(f"device should be auto, cpu, cuda, or cuda:N of {count} GPUs, got {device}")
    return torch.cuda.device(int(number))


# Convert images in memory to volumes, and label maps back to the kind of their image.


NOWHERE = Path("the image in memory")
"""Placeholder for a file name, in messages."""


def to_volume(given: Any, affine: Any = None) -> MetaTensor:
    """Return an image in the form that `volseg.read_volume` returns for its file.

    Parameters
    ----------
    given : path, sequence of paths, MetaTensor, array, Tensor, or image of nibabel or SimpleITK
        An array or a tensor is (D, H, W) or (C, D, H, W).
    affine : array, optional
        Required for an array or a tensor, and only for these: 4 x 4, voxel index to RAS+ position (mm).

    Raises
    ------
    DataError
        If the image is of another kind, or the position of its voxels in the patient is unknown.
    """
    if isinstance(given, np.ma.MaskedArray):
        raise DataError("a masked array has voxels without values: fill them first (array.filled(value))")
    is_bare = isinstance(given, np.ndarray | Tensor) and not isinstance(given, MetaTensor)
    if is_bare != (affine is not None):
        needs = (
            "needs an affine (4 x 4, voxel index to RAS+ mm)" if is_bare else "has its own affine: pass no other one"
        )
        raise DataError(f"an image given as {type(given).__name__} {needs}")
    if isinstance(given, tuple | list) and not all(isinstance(one, str | Path) for one in given):
        raise DataError("a list must contain paths, one per channel; stack arrays into one (C, D, H, W) with an affine")
    if isinstance(given, str | Path | tuple | list):
        return read_volume(given)
    if isinstance(given, Tensor) and (given.layout is not torch.strided or given.is_meta or given.is_complex()):
        raise DataError(f"a tensor should be dense, real and not meta, got {given.layout} of {given.dtype}")
    if isinstance(given, MetaTensor):
        _require_as_read(given)
        return given.detach().to(torch.float32)
    if isinstance(given, nibabel.Nifti1Image | nibabel.Nifti2Image):
        return convert_nifti(given, NOWHERE)
    if _is_simpleitk(given):
        voxels, affine = image_voxels(given, NOWHERE), image_affine(given)
    elif is_bare:
        if isinstance(given, Tensor):
            given = given.float() if given.dtype is torch.bfloat16 else given  # NumPy has no bfloat16
            given = given.numpy(force=True)
        voxels = given
        voxels = voxels[None] if voxels.ndim == 3 else voxels
    else:
        raise DataError(
            f"an image should be a path, a volume of volseg.read_volume, an array with an affine, or an image of "
            f"nibabel (NIfTI) or SimpleITK; got {type(given).__name__}"
        )
    return as_volume(voxels, _read_affine(affine), NOWHERE, stored=voxels.dtype)


def _read_affine(affine: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return an affine as numbers, 4 x 4."""
    try:
        matrix = np.asarray(affine.detach().cpu() if isinstance(affine, Tensor) else affine, dtype=np.float64)
    except (TypeError, ValueError) as fault:
        raise DataError(f"an affine should be 4 x 4 numbers (voxel index to RAS+ mm): {fault}") from fault
    if matrix.shape != (4, 4):
        raise DataError(f"an affine should be 4 x 4 (voxel index to RAS+ mm), got the shape {matrix.shape}")
    if matrix[3].tolist() != [0, 0, 0, 1]:
        raise DataError(
            f"the last row of an affine should be 0, 0, 0, 1, got {', '.join(f'{value:g}' for value in matrix[3])}; "
            "a matrix for row vectors must be transposed"
        )
    return matrix


def _require_as_read(volume: MetaTensor) -> None:
    """Raise unless a volume is on the grid of its file."""
    if volume.ndim != 4 or not volume.numel():
        raise DataError(f"a volume should have the shape (C, D, H, W), got {tuple(volume.shape)}")
    original, sides = volume.meta.get("original_affine"), volume.meta.get("spatial_shape")
    has_moved = original is not None and not np.array_equal(np.asarray(original), np.asarray(volume.affine))
    is_cut = sides is not None and tuple(map(int, sides)) != tuple(volume.shape[1:])
    if has_moved or is_cut or volume.applied_operations or volume.pending_operations:
        raise DataError(
            "a volume should be on the grid of its file, but transforms were applied to this one: pass the voxels and "
            "their affine (volume.as_tensor(), volume.affine), or the file"
        )


def as_kind_of(given: Any, label_map: MetaTensor, image: MetaTensor, names: Mapping[int, str]) -> Any:
    """Return a label map (1, D, H, W) on the image's grid as the same kind of object as the given image.

    Parameters
    ----------
    given : Any
        The argument of `to_volume`.
    label_map : MetaTensor
        Label map on the original grid of the image.
    image : MetaTensor
        The volume of ``given``.
    names : mapping
        Names of the labels by value, for an image of nibabel.
    """
    if isinstance(given, nibabel.Nifti1Image | nibabel.Nifti2Image):
        return build_label_image(label_map, image, NOWHERE, names)
    voxels = label_map.as_tensor()[0]
    if _is_simpleitk(given):
        made = simpleitk().GetImageFromArray(np.ascontiguousarray(voxels.numpy().transpose(2, 1, 0)))
        made.SetSpacing(given.GetSpacing()[:3])
        made.SetOrigin(given.GetOrigin()[:3])
        sides = given.GetDimension()
        made.SetDirection(np.reshape(given.GetDirection(), (sides, sides))[:3, :3].ravel().tolist())
        return made
    if isinstance(given, MetaTensor) or not isinstance(given, np.ndarray | Tensor):
        return label_map
    return voxels if isinstance(given, Tensor) else voxels.numpy()


def _is_simpleitk(given: Any) -> bool:
    """Return whether an object is SimpleITK's, without importing SimpleITK."""
    return type(given).__module__.partition(".")[0] == "SimpleITK" and hasattr(given, "GetDirection")
