"""List the values of a planned config, each with its reason, without side effects."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from volseg.config.sections import PREVIOUS_STAGE
from volseg.data.groups import GroupProposal
from volseg.models.residual_encoder import DECODER_BLOCKS, ENCODER_BLOCKS
from volseg.models.topology import MOST_FILTERS, MOST_FILTERS_2D, VNET_MONAI
from volseg.planning.fingerprint import Fingerprint, Intensities
from volseg.planning.geometry import CASCADE_BELOW, LARGEST_SHARE, PRESETS, Geometry, Like, is_flat
from volseg.transforms.grid import find_coarse_axis

MASKED_BELOW = 0.75
"""Share of voxels left by cropping below which moments are computed over nonzero voxels (nnU-Net's number)."""

PEAK_RATES = {"unet": (3.0e-3, 9), "resenc": (3.0e-3, 9), "vnet": (5.0e-3, 8), "whole": (3.0e-3, 9)}
"""Learning rate that was best on MSD Task04, and its batch."""

EPOCHS, ITERATIONS = 100, 250

NUM_FOLDS = 5
"""nnU-Net's number of folds."""

ONE_PIECE, ENOUGH_CASES = 0.99, 10
"""Share of a structure's voxels in its largest component, and number of such cases, that make it one piece."""

LONG_PLANE = 1.5
"""Ratio of a slice's sides above which it is rotated by only 15 degrees: nnU-Net's number."""

SINGLE_SLICES = (
    "the median case is one slice, for which nnU-Net plans a 2D network: strides and kernels of 1 across it; an axis "
    "within it is halved while it has 8 voxels or more"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a config, and its reason."""

    key: str
    """Dotted key; a number names an item of a list."""
    value: Any
    reason: str = ""


def list_settings(
    fingerprint: Fingerprint,
    geometry: Geometry,
    preset: str,
    *,
    root: str | Path,
    name: str,
    skip_bad: bool,
    given_folds: int = 0,
    patients: GroupProposal | None = None,
    like: Like | None = None,
    previous_stage: str | None = None,
) -> Iterator[Setting]:
    """Yield the settings in the order of the file.

    Parameters
    ----------
    fingerprint, geometry
        Those of the task.
    preset : str
        A key of `PRESETS`.
    root : path
        The data set's folder.
    name : str
        Name of the experiment.
    skip_bad : bool
        Train without the bad cases.
    given_folds : int
        Number of folds that the data set defines.
    patients : GroupProposal, optional
        Groups of the cases by patient.
    like : Like, optional
        The trained network of ``geometry``.
    previous_stage : str, optional
        Folder of the cross-validation of a cascade's first stage.
    """
    yield Setting("name", name)
    yield from _list_data(fingerprint, geometry, root, skip_bad)
    if previous_stage is not None:
        reason = "label maps of the cascade's first stage, from the fold that validates each case: nnU-Net's rule"
        yield Setting("data.previous_stage", previous_stage, reason)
    yield from _list_split(len(fingerprint.cases), given_folds, patients)
    yield from _list_preprocessing(fingerprint, geometry, is_second=previous_stage is not None)
    yield from _list_patch(geometry, preset, like)
    yield from _list_augmentation(fingerprint, geometry, preset)
    yield from _list_network(geometry, preset, like)
    yield from _list_losses(fingerprint)
    yield from _list_training(geometry, preset)
    if like is not None:
        reason = "initial weights; leave it out to train the same network from scratch"
        yield Setting("training.start_from", like.source, reason)
    yield from _list_inference(fingerprint, geometry, preset)


def _list_data(fingerprint: Fingerprint, geometry: Geometry, root: str | Path, skip_bad: bool) -> Iterator[Setting]:
    yield Setting("data.root", str(root))
    if skip_bad:
        yield Setting("data.skip_bad", True, "planned without the bad cases, so trained without them")
    size = geometry.voxels * (4 * len(fingerprint.channels) + 1) / 2**30
    reason = f"all prepared cases take about {size:.2g} GiB; the GPU stores as many as fit into 30 % of its free memory"
    yield Setting("data.keep", "auto", reason)


def _list_split(num_cases: int, given_folds: int, patients: GroupProposal | None) -> Iterator[Setting]:
    units, num_units = ("cases", num_cases) if patients is None else ("patients", patients.num_patients)
    if given_folds:
        yield Setting("split.fold", 0, f"of the {given_folds} folds of the data set")
    elif num_units >= NUM_FOLDS:
        reason = f"of nnU-Net's five folds: KFold({NUM_FOLDS}, shuffle=True, random_state=12345)"
        if patients is not None:
            reason = "of five folds with the same number of validation cases, as far as whole patients allow"
        yield Setting("split.fold", 0, reason)
    elif num_units > 1:
        reason = f"nnU-Net's five folds need five {units}: one of the {num_units} validates, the others train"
        yield Setting("split.num_folds", num_units, reason)
        yield Setting("split.fold", 0)
    else:
        reason = "the only case is used for training, so there is no validation Dice"
        yield Setting("split.validation", "none", reason)
    if patients is not None:
        reason = f"{patients.reason}. Set none if each case has its own patient"
        yield Setting("split.group", patients.group, reason)


def _list_preprocessing(fingerprint: Fingerprint, geometry: Geometry, *, is_second: bool) -> Iterator[Setting]:
    orientation = {"name": "Orientation", "axcodes": geometry.axcodes}
    reason = "turn the axes of every case to the same directions; nnU-Net keeps the axes of the files"
    yield Setting("preprocessing.0", orientation, reason)
    kept = [case.kept for case in fingerprint.cases]
    reason = (
        f"to the box of nonzero voxels, {np.median(kept):.0%} of the median case and at least {min(kept):.0%} of any"
    )
    yield Setting("preprocessing.1", {"name": "CropForeground"}, reason)
    number = 2
    for value, reason in _normalise(fingerprint):
        yield Setting(f"preprocessing.{number}", value, reason)
        number += 1
    value = {"name": "Spacing", "spacing": [_shorten(mm) for mm in geometry.spacing]}
    reason = f"mm: {geometry.spacing_rule}"
    if any(
        find_coarse_axis(mm) is not None for mm in (geometry.spacing, *(case.spacing for case in fingerprint.cases))
    ):
        value["thick_slices"] = "nearest"
        reason += (
            "; if one axis is more than 3 times the finest, planes are resampled, and across them the nearest is used"
        )
    yield Setting(f"preprocessing.{number}", value, reason)
    if is_second:
        labels = sorted(value for value in fingerprint.labels if value)
        reason = "a mask per label of the first stage, as additional channels: nnU-Net's cascade"
        yield Setting(f"preprocessing.{number + 1}", {"name": PREVIOUS_STAGE, "labels": labels}, reason)


def _normalise(fingerprint: Fingerprint) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a step for each scheme that the channels' names select, as in nnU-Net."""
    kept = float(np.median([case.kept for case in fingerprint.cases]))
    schemes = [{"ct": "ct", "nonorm": "none"}.get(name.casefold(), "zscore") for name in fingerprint.channels]
    for channel, scheme in enumerate(schemes):
        if scheme != "ct":
            continue
        only = {} if len(schemes) == 1 else {"channels": [channel]}
        yield (
            _clip_ct(fingerprint.intensities[channel] if fingerprint.intensities else None) | only,
            (
                "the channel is called CT, so its scale is the same in every case: clip to percentiles 0.5 and 99.5 of "
                "the foreground of all cases, subtract its mean and divide by its standard deviation"
            ),
        )
    scored = [channel for channel, scheme in enumerate(schemes) if scheme == "zscore"]
    if scored:
        value: dict[str, Any] = {"name": "ZScore"}
        reason = "scale each channel of each case to mean 0 and standard deviation 1, as it is not called CT"
        if kept < MASKED_BELOW:
            value["nonzero"] = True
            reason += f"; over nonzero voxels, as cropping leaves {kept:.0%} of the median case, less than 75 %"
        if len(scored) < len(schemes):
            value["channels"] = scored
        yield value, reason


def _clip_ct(found: Intensities | None) -> dict[str, Any]:
    if found is None:  # no voxel was read
        return {"name": "ClipZScore", "percentiles": [0.5, 99.5]}
    lower, upper, mean = (_shorten(x) for x in (found.percentile_00_5, found.percentile_99_5, found.mean))
    return {"name": "ClipZScore", "lower": lower, "upper": upper, "mean": mean, "std": _shorten(max(found.std, 1e-8))}


def _list_patch(geometry: Geometry, preset: str, like: Like | None) -> Iterator[Setting]:
    sizes, batches = _explain_patch(geometry, preset) if like is None else [f"as in {like.source}"] * 2
    yield Setting("patch.size", list(geometry.patch), sizes)
    yield Setting("patch.batch", geometry.batch, batches)
    reason = "share of a batch that is certain to contain foreground: nnU-Net's number"
    yield Setting("patch.foreground", 0.33, reason)
    covered = math.prod(geometry.patch) / math.prod(geometry.median_shape)
    if like is None and covered < CASCADE_BELOW:
        yield Setting(
            "",
            None,
            f"A patch covers {covered:.0%} of the median case: nnU-Net would also plan a cascade from a coarser "
            "grid, like the preset cascade; the preset whole processes whole cases on several GPUs.",
        )


def _explain_patch(geometry: Geometry, preset: str) -> list[str]:
    """Return the reasons for the size and for the batch."""
    median = " x ".join(f"{side:g}" for side in geometry.median_shape)
    million = f"{geometry.features / 1e6:.0f} million features"
    size = (
        f"proportions of the median case ({median} voxels at this spacing), as large as fits: {million} per "
        f"patch; with a batch of 2, {geometry.reference / 1e6:.0f} million fit"
    )
    if preset == "whole":
        longest = " x ".join(map(str, geometry.largest_shape))
        size = (
            f"the longest case along each axis ({longest} voxels; the median case has {median}), "
            f"rounded up to the network's strides, so that every case fits whole: {million}"
        )
    if geometry.num_gpus > 1:
        return [size, f"one volume at a time, on {geometry.num_gpus} GPUs"]
    share = geometry.batch * math.prod(geometry.patch) / geometry.voxels
    batch = (
        f"as many patches as fit, up to about {LARGEST_SHARE[preset]:.0%} of the data set's voxels, but at least 2: "
        f"nnU-Net's rule; this batch has {share:.2%} of the voxels"
    )
    return [size, batch]


def _list_augmentation(fingerprint: Fingerprint, geometry: Geometry, preset: str) -> Iterator[Setting]:
    if preset == "whole":
        yield Setting("augmentation.margin", 0.0, "a whole volume has no voxels beyond its border")
        if geometry.num_gpus > 1:
            off = {"probability": 0.0}
            reason = "interpolation and filters would need several volumes at once on the GPU that cuts them"
            for effect in ("rotation", "scaling", "blur", "low_resolution"):
                yield Setting(f"augmentation.{effect}", off, reason)
                reason = ""
    else:
        yield Setting("augmentation.margin", 0.43, "margin around a patch: nnU-Net's number")
    if geometry.num_gpus == 1 and is_flat(geometry.patch, geometry.coarse):
        others = [axis != geometry.coarse for axis in range(3)]
        degrees = [0.0 if other else 180.0 for other in others]
        reason = (
            "the patch is flat (more than 3 times shorter along its coarsest axis): rotated only about that axis, "
            "but by any angle, as in nnU-Net's dummy 2D augmentation"
        )
        plane = [side for side, other in zip(geometry.patch, others, strict=True) if other]
        if geometry.is_2d and max(plane) > LONG_PLANE * min(plane):
            degrees = [0.0 if other else 15.0 for other in others]
            reason = "single slices, one side more than 1.5 times the other: rotated within the plane, as in nnU-Net"
        yield Setting("augmentation.rotation", {"degrees": degrees}, reason)
        yield Setting("augmentation.scaling", {"axes": others}, "only within planes, for the same reason")
        yield Setting("augmentation.low_resolution", {"axes": others}, "likewise")
    if sides := _list_sides(fingerprint):
        reason = (
            f"{sides[0]} and {sides[1]} differ by the side of the body, and left-right mirroring would swap them; "
            "nnU-Net mirrors nevertheless"
        )
        axes = [letter not in "LR" for letter in geometry.axcodes]
        yield Setting("augmentation.mirror", {"axes": axes}, reason)


def _list_sides(fingerprint: Fingerprint) -> tuple[str, str] | None:
    """Return the first two labels or regions whose names differ only by left and right."""
    names = {name.casefold(): name for name in (*fingerprint.labels.values(), *fingerprint.regions)}
    for lowered, name in names.items():
        other = re.sub(r"(?<![a-z])left(?![a-z])", "right", lowered)
        if other != lowered and other in names:
            return name, names[other]
    return None


def _list_network(geometry: Geometry, preset: str, like: Like | None) -> Iterator[Setting]:
    if like is not None:
        reason = f"the network of {like.source}, which its weights fit"
        for key, value in {"name": like.network["name"], **like.network}.items():
            yield Setting(f"network.{key}", value, reason if key == "name" else "")
        return
    topology = geometry.topology
    assert topology is not None, "of a planned network"
    if preset == "vnet":
        yield Setting("network.name", "VNet", PRESETS[preset])
        if topology != VNET_MONAI:
            reason = (
                "an axis is halved once its spacing is below twice the finest, a coarse or thin axis only while it has "
                "8 voxels or more"
            )
            reason = SINGLE_SLICES if geometry.is_2d else reason
            yield Setting("network.strides", _nest(topology.strides), reason)
            reason = "5 voxels along an axis once its spacing is below twice the finest, 1 before"
            yield Setting("network.kernel_size", _nest(topology.kernels), reason)
        reason = "best on MSD Task04; the V-Net's authors use none"
        yield Setting("network.dropout_prob_down", 0.2, reason)
        yield Setting("network.dropout_prob_up", [0.2, 0.2])
        yield Setting("network.dropout_prob_fine", 0.1)
        return
    residual = preset == "resenc"
    yield Setting("network.name", "ResEncUNet" if residual else "DynUNet", PRESETS[preset])
    reason = "an axis is halved while it has 8 voxels or more, and its spacing is below twice the finest of such axes"
    reason = SINGLE_SLICES if geometry.is_2d else reason
    yield Setting("network.strides", _nest(topology.strides), reason)
    reason = "3 voxels along an axis once its spacing is below twice the finest, 1 before"
    yield Setting("network.kernel_size", _nest(topology.kernels), reason)
    yield Setting(
        "network.filters",
        list(topology.filters),
        f"doubled with each stage, up to {MOST_FILTERS_2D if geometry.is_2d else MOST_FILTERS}",
    )
    if residual:
        blocks = list(ENCODER_BLOCKS[: len(topology.strides)])
        yield Setting("network.blocks", blocks, "residual blocks of each stage: nnU-Net's numbers")
        yield Setting("network.decoder_blocks", DECODER_BLOCKS, "convolutions of each decoder stage")
    reason = "also a loss on the coarser stages, weighted 1, 1/2, 1/4 ..."
    yield Setting("network.deep_supervision", True, reason)


def _list_losses(fingerprint: Fingerprint) -> Iterator[Setting]:
    loss: dict[str, Any] = {"name": "DiceCELoss"}
    reason = "Dice and cross entropy, summed as in nnU-Net"
    if not fingerprint.regions:  # regions have no background
        loss["include_background"] = False
        reason += (
            "; Dice is a mean over the foreground, as in nnU-Net: with the background, the validation Dice was the "
            "same on MSD Task04 (slices of 1 and of 5 mm), but the loss looked better than the segmentation"
        )
    yield Setting("losses.0", loss, reason)


def _list_training(geometry: Geometry, preset: str) -> Iterator[Setting]:
    peak, batch = PEAK_RATES[preset]
    rate = float(f"{min(peak, peak * math.sqrt(geometry.batch / batch)):.2g}")
    reason = (
        f"best on MSD Task04 with averaged weights: {peak:g} for a batch of {batch}, for smaller batches in "
        "proportion to the square root of the batch (Malladi et al., arXiv:2205.10287). nnU-Net: SGD at 0.01"
    )
    yield Setting("optimizer.name", "AdamW", reason)
    yield Setting("optimizer.lr", rate)
    yield Setting("optimizer.weight_decay", 0.01)
    yield Setting("schedule.name", "cosine", "falls from the peak to 0, after a warmup over 4 % of the training")
    yield Setting("schedule.warmup", 0.04)
    reason = (
        f"{EPOCHS * ITERATIONS:,} batches, a tenth of nnU-Net's 250,000: on Task04, a fiftieth reached the Dice of "
        "its SGD. Difficult tasks improve with more: --set training.epochs=400"
    )
    yield Setting("training.epochs", EPOCHS, reason)
    yield Setting("training.iterations", ITERATIONS, "batches per epoch: nnU-Net's number")
    yield Setting("training.validate_every", 10, "epochs: ten validations during the training")
    yield Setting("training.clip", 12, "largest norm of the gradient: nnU-Net's number")
    reason = "validations and predictions use weights averaged over about 1000 batches"
    yield Setting("training.ema", 0.999, reason)


def _list_inference(fingerprint: Fingerprint, geometry: Geometry, preset: str) -> Iterator[Setting]:
    if preset != "whole":
        reason = "the size of the training's patches; neighbouring windows overlap by half, as in nnU-Net"
        yield Setting("inference.window", list(geometry.patch), reason)
        yield Setting("inference.overlap", 0.5)
    else:
        yield Setting("inference.window", None, "the whole volume at once")
    sides = _list_sides(fingerprint)
    reason = "no average over mirrorings, which would swap the sides" if sides else "average over the eight mirrorings"
    yield Setting("inference.mirror", sides is None, reason)
    if names := _list_single(fingerprint):
        reason = (
            f"label(s) whose largest component has at least {ONE_PIECE:.0%} of the voxels in every case: other "
            "components of a prediction are stray; nnU-Net decides this by cross-validation, like `volseg postprocess`"
        )
        yield Setting("inference.keep_largest", names, reason)
    if geometry.num_gpus > 1:
        reason = (
            f"each volume is cut into slabs, one per GPU: {geometry.features / 1e6:.0f} million features, of "
            f"which {2 * geometry.reference / 1e6:.0f} million fit one GPU"
        )
        yield Setting("parallel.spatial", geometry.num_gpus, reason)


def _list_single(fingerprint: Fingerprint) -> list[str]:
    """Return the structures that are one component in every case that has them, if enough cases do."""
    shares: dict[str, list[float]] = {}
    for case in fingerprint.cases:
        for name, share in case.largest.items():
            shares.setdefault(name, []).append(share)
    return [name for name, found in shares.items() if len(found) >= ENOUGH_CASES and min(found) >= ONE_PIECE]


def _nest(triples: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(triple) for triple in triples]


def _shorten(number: float) -> float:
    """Return a number with six digits, enough for millimetres and intensities."""
    return float(f"{number:.6g}")
