"""Batches per second of a config's training: ours beside the plain MONAI loop, in one run on the same cores.

python workflows/benchmarks/throughput.py configs/task04_unet.yaml DIR/Task04_Hippocampus --cores 2 \
        --result workflows/benchmarks/results/dynunet_h200_batches_per_second.json

Each loop makes its batches (crop, augmentation), trains on them, and is timed in windows of batches, the device waited
for at a window's end only. A warm-up comes first: recording and tuning are not what is measured.
"""

import argparse
import inspect
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
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
from results import make_parser, write_result
from task04 import first_cores
from torch.utils.data import RandomSampler

from volseg import experiment
from volseg.config.augmentation import AugmentationConfig
from volseg.config.parallel import ParallelConfig
from volseg.config.schema import ExperimentConfig
from volseg.data.case_store.preprocessed import prepare_all
from volseg.data.cases import Case, Task
from volseg.data.layouts import load_task
from volseg.experiment.building import build_batches, build_training, preprocessing_of
from volseg.experiment.placement.placed_network import build_model, choose_device
from volseg.workflow import Hook, Training
from volseg.workflow.components import SEGMENTATION, AnyDepth, build_optimizer
from volseg.workflow.precision import Precision

BOTH = ("image", "label")

NEVER = 10**9
"""Batches that no loop reaches."""


def main() -> None:
    """Time the chosen loops one after another and write what they came to."""
    parser = make_parser(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cores", type=int, help="CPU cores to use; default all")
    parser.add_argument("--cases", type=int, help="cases to use; default all")
    parser.add_argument("--rows", nargs="+", choices=("ours", "monai", "monai_gpu"), default=["ours", "monai"])
    parser.add_argument("--warm-up", type=int, default=30, help="batches before the first window")
    parser.add_argument("--window", type=int, default=20, help="batches per window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120, help="limit per loop; windows not ended by then are left")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.cores and len(os.sched_getaffinity(0)) != chosen.cores:
        # Anew: setting the affinity would leave out the threads that imported libraries have started.
        os.sched_setaffinity(0, first_cores(chosen.cores))
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 (this very program, its own arguments)

    config = experiment.load_config(chosen.config, [*chosen.overrides, f"data.root={chosen.root}"])
    device, task = choose_device(config), load_task(chosen.root)
    cases = prepare_all(task.training[: chosen.cases], preprocessing_of(config))
    result: dict[str, Any] = {
        "device": device.type,
        "workers": len(os.sched_getaffinity(0)),
        "batches": {"warm_up": chosen.warm_up, "window": chosen.window, "windows": chosen.windows},
        "config": config.model_dump(mode="json"),
        "rows": {},
    }
    for name in chosen.rows:
        clock = Windows(chosen, device)
        try:
            ROWS[name](config, task, cases, device, clock)
        except Exception as fault:  # one loop must not lose the others
            result["rows"][name] = {"failed": f"{type(fault).__name__}: {fault}"}
        else:
            result["rows"][name] = clock.result()
        print(name, result["rows"][name], flush=True)
    rates = {name: row["batches_per_second"] for name, row in result["rows"].items() if "failed" not in row}
    result["ours_over"] = {name: rates["ours"] / rate for name, rate in rates.items() if "ours" in rates}
    write_result(chosen.result, **result)
    print(json.dumps(result["ours_over"]))


class Windows:
    """A stopwatch that is told after every batch."""

    def __init__(self, chosen: argparse.Namespace, device: torch.device) -> None:
        self.warm_up, self.window, self.windows = chosen.warm_up, chosen.window, chosen.windows
        self.device, self.begin, self.deadline = device, time.perf_counter(), time.perf_counter() + chosen.seconds
        self.count, self.marks = 0, list[float]()

    def after_batch(self) -> bool:
        """Take the time where a window ends; return whether everything is measured, or the limit is reached."""
        self.count += 1
        past = self.count - self.warm_up
        if past >= 0 and past % self.window == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.marks.append(time.perf_counter())
        return len(self.marks) > self.windows or time.perf_counter() > self.deadline

    def result(self) -> dict[str, float | list[float]]:
        """Return the median rate.

        Raises
        ------
        RuntimeError
            If no window was ended.
        """
        if len(self.marks) < 2:
            raise RuntimeError(
                f"{self.count} batches until the limit, fewer than warm-up and a window; raise --seconds"
            )
        seconds = [later - earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)]
        return {
            "batches_per_second": self.window / statistics.median(seconds),
            "milliseconds_per_batch": 1000 * statistics.median(seconds) / self.window,
            "windows_seconds": seconds,
            "seconds_to_first_window": self.marks[0] - self.begin,
        }


class StopAfter(Hook):
    """End a training when its stopwatch says so."""

    def __init__(self, clock: Windows) -> None:
        self.clock = clock

    def on_batch_end(self, training: Training, fields: object) -> None:  # noqa: ARG002 (names of the event)
        """Tell the stopwatch."""
        if self.clock.after_batch():
            raise Measured


class Measured(Exception):  # noqa: N818 (not a fault: the way out of a loop that would go on)
    """Everything is measured."""


def ours(config: ExperimentConfig, task: Task, cases: list[Case], device: torch.device, clock: Windows) -> None:
    """Run the training of the config as `volseg train` does."""
    model = build_model(config, task, device)
    batches = build_batches(config, task, cases, device)
    training = build_training(config, model, batches, validation=None, hooks=[StopAfter(clock)])
    try:
        training.run()
    except Measured:
        return
    raise RuntimeError(f"the config's training ended after {clock.count} batches; set training.epochs higher")


def in_processes(config: ExperimentConfig, task: Task, cases: list[Case], device: torch.device, clock: Windows) -> None:
    """Run the plain loop; one worker process per core makes augmented batches."""
    set_track_meta(True)  # MONAI's default
    dataset = CacheDataset(tensors(cases), transforms(config, "cpu"), progress=False)
    loader = DataLoader(
        dataset,
        batch_size=config.patch.batch,
        sampler=sampler(config, dataset),
        num_workers=len(os.sched_getaffinity(0)),
        pin_memory=torch.cuda.is_available(),
        persistent_workers=True,
    )
    until_measured(steps(config, task, loader, device), clock)


def in_threads(config: ExperimentConfig, task: Task, cases: list[Case], device: torch.device, clock: Windows) -> None:
    """Run MONAI's fast form: cases are cached and augmented on the device."""
    set_track_meta(False)  # as the guide does
    dataset = CacheDataset(tensors(cases), transforms(config, device), progress=False, copy_cache=False)
    loader = ThreadDataLoader(dataset, batch_size=config.patch.batch, sampler=sampler(config, dataset), num_workers=0)
    until_measured(steps(config, task, loader, device), clock)


def until_measured(steps: Iterator[None], clock: Windows) -> None:
    """Take steps until the stopwatch has its windows."""
    for _ in steps:
        if clock.after_batch():
            return


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


def sampler(config: ExperimentConfig, dataset: Dataset) -> RandomSampler:
    """Return cases in random order without an end of an epoch, at which worker processes would run empty."""
    return RandomSampler(dataset, replacement=True, num_samples=NEVER * config.patch.batch)


def tensors(cases: Sequence[Case]) -> list[dict[str, torch.Tensor]]:
    """Return prepared cases as plain tensors."""
    return [{name: as_plain(case[name]) for name in BOTH} for case in cases]


def as_plain(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor without metadata."""
    return values.as_tensor() if hasattr(values, "as_tensor") else values


def _offsets(factor: tuple[float, float]) -> tuple[float, float]:
    return factor[0] - 1, factor[1] - 1


ROWS: dict[str, Callable[[ExperimentConfig, Task, list[Case], torch.device, Windows], None]] = {
    "ours": ours,
    "monai": in_processes,
    "monai_gpu": in_threads,
}

if __name__ == "__main__":
    main()
