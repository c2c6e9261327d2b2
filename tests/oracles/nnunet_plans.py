"""Write ``tests/planning/nnunet_plans.json``: fingerprints, and the plans of nnU-Net's own planners for them.

Needs nnunetv2, which the tests do not: ``python tests/oracles/nnunet_plans.py``. Its planners run as they are,
but for two things that no figure of the full-resolution plan depends on and that take hours: no 2D network and no
cascade is planned, and networks are counted on meta tensors.
"""

import json
import os
import random
import sys
import tempfile
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
os.environ.update(nnUNet_raw=str(FOLDER / "raw"), nnUNet_preprocessed=str(FOLDER / "ready"), nnUNet_results=str(FOLDER))

import torch  # noqa: E402
from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner  # noqa: E402
from nnunetv2.experiment_planning.experiment_planners.residual_unets.residual_encoder_unet_planners import (  # noqa: E402
    nnUNetPlannerResEncL,
    nnUNetPlannerResEncM,
    nnUNetPlannerResEncXL,
)

PLANNERS = {
    kind.__name__: kind
    for kind in (ExperimentPlanner, nnUNetPlannerResEncM, nnUNetPlannerResEncL, nnUNetPlannerResEncXL)
}

# Cases, channels, labels (with the background), median shape and spacing as (z, y, x), share left by the cropping: of
# data sets whose cases all are about as the median one of an MSD task is. The tasks' own plans come from their cases.
MSD = {
    "Task01_BrainTumour": (484, ("FLAIR", "T1w", "t1gd", "T2w"), 4, (138, 169, 138), (1.0, 1.0, 1.0), 0.37),
    "Task02_Heart": (20, ("MRI",), 2, (115, 320, 232), (1.37, 1.25, 1.25), 1.0),
    "Task03_Liver": (131, ("CT",), 3, (432, 512, 512), (1.0, 0.767578125, 0.767578125), 1.0),
    "Task04_Hippocampus": (260, ("MRI",), 3, (36, 50, 35), (1.0, 1.0, 1.0), 1.0),
    "Task05_Prostate": (32, ("T2", "ADC"), 3, (20, 320, 319), (3.5999999046325684, 0.625, 0.625), 1.0),
    "Task06_Lung": (63, ("CT",), 2, (252, 512, 512), (1.24499455, 0.78515625, 0.78515625), 1.0),
    "Task07_Pancreas": (281, ("CT",), 3, (93, 512, 512), (2.5, 0.8027340173721313, 0.8027340173721313), 1.0),
    "Task08_HepaticVessel": (303, ("CT",), 3, (49, 512, 512), (5.0, 0.798828125, 0.798828125), 1.0),
    "Task09_Spleen": (41, ("CT",), 2, (90, 512, 512), (5.0, 0.79296899, 0.79296899), 1.0),
    "Task10_Colon": (126, ("CT",), 2, (95, 512, 512), (5.0, 0.78125, 0.78125), 1.0),
}


def draw_case(rng, kind):
    """Draw shape and spacing (z, y, x) of one case about those of its data set."""
    shape = [max(1, round(side * rng.uniform(0.8, 1.25))) for side in kind["shape"]]
    spacing = [round(mm * rng.choice((1.0, 1.0, 0.7, 1.3)), 6) for mm in kind["spacing"]]
    return shape, spacing


def draw_data_set(rng):
    """Draw sizes, spacings, channels and labels of a data set, with thick slices in any direction or without."""
    slices = rng.random() < 0.4
    plane = rng.choice((48, 96, 160, 256, 320, 512))
    fine = rng.choice((0.4, 0.7, 0.8, 1.0, 1.25))
    depth = rng.choice((12, 20, 30, 60, 100)) if slices else rng.choice((40, 64, 128, 200, 400))
    thick = rng.choice((2.0, 3.0, 3.6, 5.0, 8.0)) if slices else fine * rng.choice((1.0, 1.0, 1.5, 2.0))
    shape = [depth, plane, plane + rng.choice((0, 0, -16, 24))]
    spacing = [thick, fine, fine]
    turn = rng.choice((0, 0, 0, 1, 2))
    kind = {"shape": shape[turn:] + shape[:turn], "spacing": spacing[turn:] + spacing[:turn]}
    cases = [draw_case(rng, kind) for _ in range(rng.randint(2, 6))]
    return {
        "spacings": [spacing for _, spacing in cases],
        "shapes": [shape for shape, _ in cases],
        "num_training": len(cases) * rng.choice((1, 5, 30)),
        "channels": list(rng.choice((("CT",), ("MRI",), ("T2", "ADC"), ("ct", "PET"), ("a", "b", "c", "d")))),
        "num_labels": rng.choice((2, 3, 4, 14)),
        "kept": rng.choice((1.0, 0.9, 0.75, 0.5)),
    }


def list_data_sets():
    """Yield what is planned."""
    for name, (cases, channels, labels, shape, spacing, kept) in MSD.items():
        yield {
            "name": name,
            "spacings": [list(spacing)],
            "shapes": [list(shape)],
            "num_training": cases,
            "channels": list(channels),
            "num_labels": labels,
            "kept": kept,
        }
    rng = random.Random(0)
    for number in range(230):
        yield {"name": f"drawn {number}", **draw_data_set(rng)}


def run_planner(data_set, planner, memory):
    """Return the full-resolution plan of one of nnU-Net's planners."""
    name = "Dataset001_Any"
    raw, ready = FOLDER / "raw" / name, FOLDER / "ready" / name
    for folder in (raw, ready):
        folder.mkdir(parents=True, exist_ok=True)
    dataset = {
        "channel_names": {str(i): channel for i, channel in enumerate(data_set["channels"])},
        "labels": {("background" if i == 0 else f"label{i}"): i for i in range(data_set["num_labels"])},
        "numTraining": data_set["num_training"],
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "SimpleITKIO",
        "dataset": {"case": {"images": ["case_0000.nii.gz"], "label": "case.nii.gz"}},
    }
    (raw / "dataset.json").write_text(json.dumps(dataset), encoding="utf-8")
    times = data_set["num_training"] // len(data_set["shapes"])
    fingerprint = {
        "spacings": data_set["spacings"] * times,
        "shapes_after_crop": data_set["shapes"] * times,
        "foreground_intensity_properties_per_channel": {},
        "median_relative_size_after_cropping": data_set["kept"],
    }
    (ready / "dataset_fingerprint.json").write_text(json.dumps(fingerprint), encoding="utf-8")
    (ready / "nnUNetPlans.json").unlink(missing_ok=True)

    class Quick(PLANNERS[planner]):
        def get_plans_for_configuration(self, spacing, *arguments):
            return {} if len(spacing) == 2 else super().get_plans_for_configuration(spacing, *arguments)

        def determine_transpose(self):  # the cascade
            self.lowres_creation_threshold = 0
            return super().determine_transpose()

    with torch.device("meta"), redirect_stdout(sys.stderr):
        plans = Quick(1, memory, plans_name="nnUNetPlans").plan_experiment()
    plan = plans["configurations"]["3d_fullres"]
    network = plan["architecture"]["arch_kwargs"]
    return {
        "transpose": plans["transpose_forward"],
        "spacing": plan["spacing"],
        "median": plan["median_image_size_in_voxels"],
        "patch": plan["patch_size"],
        "batch": plan["batch_size"],
        "strides": network["strides"],
        "kernels": network["kernel_sizes"],
        "filters": network["features_per_stage"],
        "normalisation": plan["normalization_schemes"],
        "masked": plan["use_mask_for_norm"],
    }


def main():
    """Plan each data set by several planners."""
    rng = random.Random(1)
    plans = []
    for number, data_set in enumerate(list_data_sets()):
        runs = [("ExperimentPlanner", 8), ("nnUNetPlannerResEncM", 8)]
        if number % 5 == 0:
            runs += [("nnUNetPlannerResEncL", 24), ("nnUNetPlannerResEncXL", 40)]
            runs += [("ExperimentPlanner", rng.choice((4, 12, 16, 24))), ("nnUNetPlannerResEncM", 16)]
        found = []
        for planner, memory in runs:
            try:
                found.append({"planner": planner, "memory": memory, "plan": run_planner(data_set, planner, memory)})
            except Exception as fault:  # a data set that nnU-Net plans no 3D network for
                found.append({"planner": planner, "memory": memory, "fault": f"{type(fault).__name__}: {fault}"})
        plans.append({**data_set, "plans": found})
        sys.stderr.write(f"{number} {data_set['name']}\n")
    packages = ("nnunetv2", "dynamic_network_architectures", "numpy", "torch")
    content = {"versions": {name: version(name) for name in packages}, "data_sets": plans}
    lines = json.dumps(content, default=int).replace('{"name"', '\n{"name"')
    (Path(__file__).parents[2] / "tests/planning/nnunet_plans.json").write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
