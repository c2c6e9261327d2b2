"""The training loop as MONAI's tutorials write it, with the network, loss, optimizer and patches of a config.

Two forms: `in_workers` is the common one (CacheDataset in memory, transforms per sample in worker processes,
autocast); `on_gpu` follows MONAI's fast training guide (cases cached on the GPU, transforms there, ThreadDataLoader).
The transforms do what ``volseg.transforms.augmentation`` does, with the same probabilities. Where MONAI offers a choice
the faster one is taken: one ``RandAffined`` for rotation and scaling, no border read around the patch, foreground
indices cached, plain tensors in the network.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import monai.losses
import torch
from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader, set_track_meta
from monai.transforms import (
    Compose,
    EnsureTyped,
    FgBgToIndicesd,
    RandAdjustContrastd,
    RandAffined,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    RandGaussianSmoothd,
    RandScaleIntensityd,
    RandScaleIntensityFixedMeand,
    RandSimulateLowResolutiond,
    SpatialPadd,
)
from torch.utils.data import RandomSampler

from volseg.config.augmentation import AugmentationConfig
from volseg.config.schema import ExperimentConfig, ParallelConfig
from volseg.data.cases import Case, Task
from volseg.experiment.placed_network import build_model
from volseg.workflow.components import SEGMENTATION, AnyDepth, build_optimizer
from volseg.workflow.precision import Precision

__all__ = ["in_workers", "on_gpu", "steps"]

BOTH = ("image", "label")


def in_workers(config: ExperimentConfig, cases: Sequence[Case], workers: int, num_batches: int) -> Iterable[dict]:
    """Return a loader of so many augmented batches, made by worker processes."""
    set_track_meta(True)  # MONAI's default
    dataset = CacheDataset(tensors(cases), transforms(config, "cpu"), progress=False)
    return DataLoader(
        dataset,
        batch_size=config.patch.batch,
        sampler=sampler(config, dataset, num_batches),
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
    )


def on_gpu(config: ExperimentConfig, cases: Sequence[Case], device: torch.device, num_batches: int) -> Iterable[dict]:
    """Return a loader of so many batches, cached and augmented on the device."""
    set_track_meta(False)  # as the guide does
    dataset = CacheDataset(tensors(cases), transforms(config, device), progress=False, copy_cache=False)
    shuffled = sampler(config, dataset, num_batches)
    return ThreadDataLoader(dataset, batch_size=config.patch.batch, sampler=shuffled, num_workers=0)


def steps(config: ExperimentConfig, task: Task, batches: Iterable[dict], device: torch.device) -> Iterator[None]:
    """Train one batch after another; yield after each step has been launched."""
    settings = config.training.model_copy(update={"memory_format": "contiguous"})
    config = config.model_copy(update={"parallel": ParallelConfig(), "training": settings})
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    model = build_model(config, task, device).train()
    losses = [monai_loss(loss.spec()) for loss in config.losses]
    optimizer = build_optimizer(config.optimizer.spec(), model, on_gpu=False)
    precision = Precision.choose(config.training.precision, device)
    scaler = precision.scaler()
    for batch in batches:
        # Metadata are of no use from here on and would slow down every operator.
        fields = {name: as_plain(batch[name]).to(device, non_blocking=True) for name in BOTH}
        optimizer.zero_grad()
        with precision.autocast():
            fields["logits"] = model(fields["image"])
            loss = sum(term(fields["logits"], fields["label"]) for term in losses)
        scaler.scale(loss).backward()
        if config.training.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
        scaler.step(optimizer)
        scaler.update()
        yield


def monai_loss(spec: Mapping[str, Any]) -> AnyDepth:
    """Return MONAI's own loss, where the config's name would give ours."""
    parameters = {**SEGMENTATION, **{key: value for key, value in spec.items() if key != "name"}}
    loss = getattr(monai.losses, spec["name"])
    known = inspect.signature(loss).parameters
    return AnyDepth(loss(**{key: value for key, value in parameters.items() if key in known}))


def transforms(config: ExperimentConfig, device: torch.device | str) -> Compose:
    """Return cached and random transforms of one case; random ones are computed where the voxels are."""
    size, on = config.patch.size, config.augmentation
    foreground = config.patch.foreground
    return Compose(
        [
            SpatialPadd(BOTH, spatial_size=size),
            FgBgToIndicesd("label"),
            EnsureTyped(BOTH, device=torch.device(device)),
            RandCropByPosNegLabeld(
                BOTH,
                label_key="label",
                spatial_size=size,
                pos=foreground,
                neg=1 - foreground,
                fg_indices_key="label_fg_indices",
                bg_indices_key="label_bg_indices",
            ),
            *(augmentations(on, torch.device(device)) if on.enabled else ()),
        ]
    )


def augmentations(on: AugmentationConfig, device: torch.device) -> list[Any]:
    """Return MONAI's counterparts of the config's effects, in its order."""
    either = 1 - (1 - on.rotation.probability) * (1 - on.scaling.probability)
    low, high = on.scaling.factor
    mirrored = [axis for axis, allowed in enumerate(on.mirror.axes) if allowed]
    return [
        RandAffined(
            BOTH,
            prob=either,
            rotate_range=[math.radians(angle) for angle in on.rotation.degrees],
            scale_range=[(low - 1, high - 1)] * 3,
            mode=("bilinear", "nearest"),
            padding_mode="zeros",
            device=device,
        ),
        *(RandFlipd(BOTH, prob=on.mirror.probability, spatial_axis=axis) for axis in mirrored),
        RandGaussianNoised("image", prob=on.noise.probability, std=on.noise.std[1]),
        RandGaussianSmoothd(
            "image",
            prob=on.blur.probability * on.blur.per_channel,
            sigma_x=on.blur.sigma_voxels,
            sigma_y=on.blur.sigma_voxels,
            sigma_z=on.blur.sigma_voxels,
        ),
        RandScaleIntensityd("image", prob=on.brightness.probability, factors=_offsets(on.brightness.factor)),
        RandScaleIntensityFixedMeand(
            "image", prob=on.contrast.probability, factors=_offsets(on.contrast.factor), preserve_range=True
        ),
        RandSimulateLowResolutiond(
            "image",
            prob=on.low_resolution.probability * on.low_resolution.per_channel,
            zoom_range=on.low_resolution.zoom,
            device=device,
        ),
        *(
            RandAdjustContrastd(
                "image", prob=gamma.probability, gamma=gamma.gamma, invert_image=inverted, retain_stats=True
            )
            for gamma, inverted in ((on.inverted_gamma, True), (on.gamma, False))
        ),
    ]


def sampler(config: ExperimentConfig, dataset: Dataset, num_batches: int) -> RandomSampler:
    """Return cases in random order without an end of an epoch, at which worker processes would run empty."""
    return RandomSampler(dataset, replacement=True, num_samples=num_batches * config.patch.batch)


def tensors(cases: Sequence[Case]) -> list[dict[str, torch.Tensor]]:
    """Return prepared cases as plain tensors."""
    return [{name: as_plain(case[name]) for name in BOTH} for case in cases]


def as_plain(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor without metadata."""
    return values.as_tensor() if hasattr(values, "as_tensor") else values


def _offsets(factor: tuple[float, float]) -> tuple[float, float]:
    return factor[0] - 1, factor[1] - 1
