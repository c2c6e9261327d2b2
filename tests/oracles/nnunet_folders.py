"""Compare predictions of nnU-Net 2 model folders with nnU-Net's own, voxel by voxel.

Needs nnunetv2 beside volseg, in an environment of its own:

    pip install nnunetv2==2.8.1 volseg
    python tests/oracles/nnunet_folders.py --folder DIR --json nnunet_cpu_folders.json

Each case is a model folder that nnU-Net's own trainer wrote: a small network, trained for some dozens of steps on
synthetic volumes so that its label maps mean something, and one with random weights. ``--store`` keeps a tiny one with
what nnU-Net predicts for the tests.
"""

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch

os.environ.setdefault("nnUNet_def_n_proc", "1")
VERSIONS = ("nnunetv2", "dynamic-network-architectures", "torch", "numpy", "scipy", "scikit-image")

KINDS = ("data", "seg", "probabilities")
SHAPED = {"order_z": 0, "force_separate_z": None}
RESAMPLING = {f"resampling_fn_{of}": "resample_data_or_seg_to_shape" for of in KINDS} | {
    f"resampling_fn_{of}_kwargs": {"is_seg": of == "seg", "order": 3 if of == "data" else 1, **SHAPED} for of in KINDS
}
IN_TORCH = {"force_separate_z": None, "memefficient_seg_resampling": False}
TORCH_RESAMPLING = {f"resampling_fn_{of}": "resample_torch_fornnunet" for of in KINDS} | {
    f"resampling_fn_{of}_kwargs": {"is_seg": of == "seg", **IN_TORCH} for of in KINDS
}
LABELS = {"background": 0, "organ": 1, "lesion": 2}
REGIONS = {"background": 0, "whole": [1, 2], "core": [2]}


def case(**changes: Any) -> dict[str, Any]:
    """Return what one comparison is made of; voxel sides and shapes are in nnU-Net's order (z, y, x)."""
    return {
        "channels": ["CT"],
        "labels": LABELS,
        "order": None,
        "schemes": ["CTNormalization"],
        "masked": [False],
        "sides": [1.2, 1.1, 1.1],
        "shape": [44, 52, 48],
        "spacing": [1.5, 1.5, 1.5],
        "patch": [32, 32, 32],
        "kernels": [[3, 3, 3]] * 3,
        "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
        "filters": [8, 16, 32],
        "residual": False,
        "old_plans": False,
        "transpose": [0, 1, 2],
        "resampling": RESAMPLING,
        "mirror": (0, 1, 2),
        "folds": 1,
        "steps": 60,
        "images": 2,
        "configuration": "3d_fullres",
        **changes,
    }


THICK = {
    "sides": [4.5, 0.9, 0.9],
    "shape": [14, 60, 56],
    "spacing": [4.0, 1.1, 1.1],
    "patch": [12, 32, 32],
    "kernels": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
}
MRI = {"channels": ["T1", "T2"], "schemes": ["ZScoreNormalization"] * 2, "masked": [True, True]}
CASES = {
    "isotropic": case(),
    "thick slices": case(**THICK),
    "two channels, transposed, plans of 2.2": case(
        **MRI, **{**THICK, "sides": [0.9, 4.5, 0.9], "shape": [60, 14, 56]}, transpose=[1, 0, 2], old_plans=True
    ),
    "residual encoder": case(residual=True, schemes=["ZScoreNormalization"], channels=["MR"]),
    "residual encoder, thick slices, 3d_lowres": case(**THICK, residual=True, configuration="3d_lowres"),
    "regions, mirrored along two axes": case(**MRI, labels=REGIONS, order=[1, 2], mirror=(0, 1)),
    "two folds, not mirrored, ignore label": case(labels={**LABELS, "ignore": 3}, folds=2, mirror=None),
    "resampled by torch": case(**THICK, resampling=TORCH_RESAMPLING, schemes=["RescaleTo01Normalization"]),
    "smaller than the patch": case(shape=[20, 44, 30], schemes=["NoNormalization"]),
    "random weights": case(steps=0),
}
TINY = case(
    **MRI, **{**THICK, "shape": [9, 40, 36], "patch": [8, 24, 24]}, labels=REGIONS, order=[1, 2], mirror=(0, 1),
    filters=[4, 6, 8], images=1, steps=80,
)  # fmt: skip


def make_volume(spec: dict[str, Any], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an image (C, z, y, x) and its label map: an organ with a lesion in a body, around which all is 0."""
    draw = np.random.default_rng(seed)
    shape = np.array(spec["shape"])
    places = np.stack(np.meshgrid(*[np.linspace(-1, 1, side) for side in shape], indexing="ij"))

    def ball(centre: Sequence[float], radius: float) -> np.ndarray:
        return ((places - np.reshape(centre, (3, 1, 1, 1))) ** 2).sum(0) < radius**2

    centre = draw.uniform(-0.15, 0.15, 3)
    body, organ = ball((0, 0, 0), 0.95), ball(centre, 0.6)
    lesion = ball(centre + draw.uniform(-0.2, 0.2, 3), 0.3)
    label = np.where(lesion, 2, np.where(organ, 1, 0))
    channels = []
    for number, _ in enumerate(spec["channels"]):
        image = 40.0 + 60.0 * organ + (1 - 2 * number) * 50.0 * lesion + draw.normal(0, 12, shape)
        channels.append(np.where(body, np.maximum(image, 1), 0))
    return np.stack(channels).astype(np.float32), label.astype(np.uint8)


def describe_architecture(
    filters: Sequence[int],
    kernels: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    *,
    blocks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the entry ``architecture`` of a configuration of nnU-Net's plans.

    Filters, kernels and strides are per stage, axes in nnU-Net's order (z, y, x); ``blocks`` makes a residual encoder.
    """
    kind, of_stages = (
        ("PlainConvUNet", "n_conv_per_stage") if blocks is None else ("ResidualEncoderUNet", "n_blocks_per_stage")
    )
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
        "arch_kwargs": {
            "n_stages": len(filters),
            "features_per_stage": list(filters),
            "conv_op": "torch.nn.modules.conv.Conv3d",
            "kernel_sizes": [list(kernel) for kernel in kernels],
            "strides": [list(stride) for stride in strides],
            of_stages: [2] * len(filters) if blocks is None else list(blocks),
            "n_conv_per_stage_decoder": [2 if blocks is None else 1] * (len(filters) - 1),
            "conv_bias": True,
            "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
            "norm_op_kwargs": {"eps": 1e-05, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def make_plans(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``plans.json`` and ``dataset.json``."""
    images = [make_volume(spec, seed)[0] for seed in range(spec["images"])]
    moments = {}
    for channel in range(len(spec["channels"])):
        values = np.concatenate([image[channel][image[channel] > 60] for image in images])
        names = "percentile_00_5", "median", "percentile_99_5"
        moments[str(channel)] = dict(zip(names, np.percentile(values, (0.5, 50, 99.5)).tolist(), strict=True))
        moments[str(channel)] |= {of: float(getattr(values, of)()) for of in ("mean", "std", "min", "max")}
    configuration = {
        "data_identifier": "nnUNetPlans_3d",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": spec["patch"],
        "median_image_size_in_voxels": [float(side) for side in spec["shape"]],
        "spacing": spec["spacing"],
        "normalization_schemes": spec["schemes"],
        "use_mask_for_norm": spec["masked"],
        "batch_dice": False,
        **spec["resampling"],
    }
    if spec["old_plans"]:
        configuration |= {
            "UNet_class_name": "PlainConvUNet",
            "UNet_base_num_features": spec["filters"][0],
            "unet_max_num_features": spec["filters"][-1],
            "n_conv_per_stage_encoder": [2] * len(spec["filters"]),
            "n_conv_per_stage_decoder": [2] * (len(spec["filters"]) - 1),
            "num_pool_per_axis": [1, 2, 2],
            "pool_op_kernel_sizes": spec["strides"],
            "conv_kernel_sizes": spec["kernels"],
        }
    else:
        configuration["architecture"] = describe_architecture(
            spec["filters"], spec["kernels"], spec["strides"], blocks=[1, 2, 2] if spec["residual"] else None
        )
    backward = np.argsort(spec["transpose"]).tolist()
    plans = {
        "dataset_name": "Dataset900_Synthetic",
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": spec["spacing"],
        "original_median_shape_after_transp": spec["shape"],
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": spec["transpose"],
        "transpose_backward": backward,
        "configurations": {"base": configuration, spec["configuration"]: {"inherits_from": "base"}},
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": moments,
    }
    dataset = {
        "channel_names": {str(number): name for number, name in enumerate(spec["channels"])},
        "labels": spec["labels"],
        "numTraining": spec["images"],
        "file_ending": ".nii.gz",
    }
    if spec["order"]:
        dataset["regions_class_order"] = spec["order"]
    return plans, dataset


def write_images(spec: dict[str, Any], folder: Path) -> list[str]:
    """Write cases that the network did not see, on oblique grids; return their ids."""
    folder.mkdir(parents=True, exist_ok=True)
    turn = np.eye(4)
    turn[:3, :3] = nib.eulerangles.euler2mat(0.1, 0.05, 0.2)
    z, y, x = spec["sides"]
    affine = turn @ np.diag([-x, -y, z, 1.0])
    affine[:3, 3] = (30, -20, 5)
    names = [f"case_{number}" for number in range(spec["images"])]
    for number, name in enumerate(names):
        image, _ = make_volume(spec, 100 + number)
        for channel, voxels in enumerate(image):
            volume = nib.Nifti1Image(np.round(voxels).astype(np.int16).transpose(2, 1, 0), affine)
            volume.set_qform(affine, code=1)
            nib.save(volume, folder / f"{name}_{channel:04d}.nii.gz")
    return names


def train_folder(spec: dict[str, Any], folder: Path) -> Path:
    """Let nnU-Net's trainer write a model folder; return it."""
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer  # reads the environment when imported

    plans, dataset = make_plans(spec)
    made = folder / "model"
    made.mkdir(parents=True)
    for fold in range(spec["folds"]):
        torch.manual_seed(fold)
        trainer = nnUNetTrainer(
            {**deepcopy(plans), "continue_training": False}, spec["configuration"], fold, dataset, torch.device("cpu")
        )
        trainer.num_iterations_per_epoch = 1
        trainer.initialize()
        trainer.inference_allowed_mirroring_axes = spec["mirror"]
        _fit(trainer, spec, dataset, fold)
        trainer.current_epoch = 1
        trainer._best_ema = np.float64(0.5)
        for key, value in (("train_losses", np.float32(0.1)), ("val_losses", np.float64(0.2))):
            trainer.logger.log(key, value, 0)
        (made / f"fold_{fold}").mkdir()
        trainer.save_checkpoint(str(made / f"fold_{fold}" / "checkpoint_final.pth"))
    for name, content in (("plans.json", plans), ("dataset.json", dataset)):
        (made / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return made


def _fit(trainer: Any, spec: dict[str, Any], dataset: dict[str, Any], fold: int) -> None:
    """Train on patches of volumes that nnU-Net's preprocessor made, by a plain loop: minutes become seconds."""
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor

    pairs = []
    for seed in range(4):
        image, label = make_volume(spec, seed)
        data, target, _ = DefaultPreprocessor(verbose=False).run_case_npy(
            image, label[None].astype(np.int8), {"spacing": spec["sides"]},
            trainer.plans_manager, trainer.configuration_manager, dataset,
        )  # fmt: skip
        low = [max(0, want - have) for want, have in zip(spec["patch"], data.shape[1:], strict=True)]
        widths = [(0, 0), *((0, short) for short in low)]
        pairs.append((np.pad(data, widths), np.pad(target, widths).clip(0)))
    draw = np.random.default_rng(fold)
    optimizer = torch.optim.Adam(trainer.network.parameters(), 3e-3)
    regions = trainer.label_manager.has_regions
    for _ in range(spec["steps"]):
        images, labels = [], []
        for _ in range(2):
            data, target = pairs[draw.integers(len(pairs))]
            corner = [draw.integers(have - want + 1) for want, have in zip(spec["patch"], data.shape[1:], strict=True)]
            box = (slice(None), *(slice(c, c + n) for c, n in zip(corner, spec["patch"], strict=True)))
            images.append(torch.from_numpy(data[box].copy()))
            labels.append(torch.from_numpy(target[box].copy()).long())
        logits, target = trainer.network(torch.stack(images))[0], torch.stack(labels)[:, 0]
        if regions:
            wanted = torch.stack([target > 0, target == 2], 1).float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted)
        else:
            loss = torch.nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def predict_by_nnunet(model: Path, images: Path, output: Path, folds: int) -> None:
    """Predict by nnU-Net's own predictor."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    output.mkdir(parents=True)
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), tuple(range(folds)))
    predictor.predict_from_files_sequential(str(images), str(output))


def compare(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Predict by both; return how many voxels agree."""
    from volseg.experiment import predict  # after nnU-Net's environment is set

    model = train_folder(spec, folder)
    names = write_images(spec, folder / "images")
    predict_by_nnunet(model, folder / "images", folder / "theirs", spec["folds"])
    predict(model, [folder / "images"], folder / "ours").require_all()
    rows = []
    for name in names:
        ours, theirs = (nib.load(folder / of / f"{name}.nii.gz") for of in ("ours", "theirs"))
        one, two = (np.asarray(image.dataobj) for image in (ours, theirs))
        rows.append(
            {
                "voxels": one.size,
                "foreground": int((two > 0).sum()),
                "values": sorted(map(int, np.unique(two))),
                "differ": int((one != two).sum()),
                "agree": float((one == two).mean()),
                "affines differ by (mm)": float(np.abs(ours.affine - theirs.affine).max()),
            }
        )
    return {"agree at least": min(row["agree"] for row in rows), "cases": rows}


def store_fixture(folder: Path, target: Path) -> None:
    """Keep the tiny model folder, an image and nnU-Net's label map in ``target``, for the tests."""
    print(json.dumps(compare(TINY, folder)))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "model", target / "model")
    for of in ("images", "theirs"):
        (target / of).mkdir()
        for file in (folder / of).glob("*.nii.gz"):
            shutil.copy(file, target / of)
    checkpoint = target / "model" / "fold_0" / "checkpoint_final.pth"
    content = torch.load(checkpoint, weights_only=False)
    content["optimizer_state"] = {}  # which nobody reads here, and which is most of the file
    torch.save(content, checkpoint)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all cases, or store the fixture; return 1 if a label map differs in more than a voxel of a thousand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="Where models, images and label maps go; new.")
    parser.add_argument("--json", type=Path, help="Where the result goes.")
    parser.add_argument("--only", help="Name of one case.")
    parser.add_argument("--store", type=Path, help="Where the fixture of the tests goes.")
    given = parser.parse_args(arguments)
    for key in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        os.environ[key] = str(given.folder / key)
    prepared = given.folder / "nnUNet_preprocessed" / "Dataset900_Synthetic" / "nnUNetPlans_3d"
    prepared.mkdir(parents=True)
    (prepared / "none.b2nd").touch()  # by its suffix the trainer knows the format of cases, of which it reads none
    if given.store:
        store_fixture(given.folder, given.store)
        return 0
    found = {}
    for number, (name, spec) in enumerate(CASES.items()):
        if given.only in (None, name):
            found[name] = compare(spec, given.folder / str(number))
            print(name, found[name]["agree at least"], [row["differ"] for row in found[name]["cases"]], flush=True)
    worst = min(result["agree at least"] for result in found.values())
    if given.json:
        from importlib.metadata import version

        versions = {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}}
        content = {"versions": versions, "agree at least": worst, "models": found}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(worst < 0.999)


if __name__ == "__main__":
    sys.exit(main())
