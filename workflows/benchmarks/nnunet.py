"""nnU-Net (PyPI nnunetv2) on the same fold, cores and GPU: seconds by phase, Dice over time, final Dice.

python workflows/benchmarks/nnunet.py DIR/Task04_Hippocampus --fold 0 --epochs 20 --cores 2 \
        --result workflows/benchmarks/results/nnunet_h200_task04_fold0.json

nnU-Net runs as its documentation says: planning and preprocessing, then training and validation (mirrored, with the
last weights) in processes of its own, torch.compile as it chooses. The one thing changed is the number of epochs; its
schedule follows. volseg writes the split before and judges the predictions after it.
"""

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cores import restart_on

from volseg.data.cases import Task
from volseg.data.layouts import load_task
from volseg.data.splits import Split, folds, write_splits
from volseg.evaluation.summary import Summary, evaluate_files, summarise
from volseg.monitoring.environment import environment

NUMBER = 4
CONFIGURATION = "3d_fullres"


def main() -> None:
    """Run nnU-Net on one fold and write what it took and reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20, help="nnU-Net's own number is 1000")
    parser.add_argument("--iterations", type=int, default=250, help="batches per epoch; nnU-Net's own number is 250")
    parser.add_argument("--validation-iterations", type=int, default=50, help="likewise; nnU-Net's own number is 50")
    parser.add_argument("--cores", type=int, help="CPU cores to use; default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, default=Path("runs/nnunet"), help="new folder for all that nnU-Net writes")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    restart_on(chosen.cores)
    if chosen.work.exists():
        sys.exit(f"{chosen.work} exists; nnU-Net would go on with what is there. Remove it, or name another --work")

    task = load_task(chosen.root)
    split_of_task = folds([case["case"] for case in task.training])
    seconds: dict[str, float] = {}
    variables = environment_of(chosen)
    begin = time.perf_counter()
    dataset = write_raw(task, chosen.work / "raw")
    seconds["writing_raw"] = time.perf_counter() - begin
    seconds["planning_and_preprocessing"] = run(planning(), variables, chosen.work / "preprocess.log")
    write_splits(chosen.work / "preprocessed" / dataset / "splits_final.json", split_of_task)
    marks_file = chosen.work / "marks.json"
    started = time.time()
    whole = run(training(chosen, dataset, marks_file), variables, chosen.work / "train.log")
    marks = json.loads(marks_file.read_text(encoding="utf-8"))
    seconds |= phases(marks, started, whole)
    begin = time.perf_counter()
    summary = judged(task, split_of_task[chosen.fold], Path(marks["output_folder"]) / "validation")
    seconds["judging"] = time.perf_counter() - begin

    plans = json.loads((chosen.work / "preprocessed" / dataset / "nnUNetPlans.json").read_text(encoding="utf-8"))
    plan = plans["configurations"][CONFIGURATION]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": {**environment(), "nnunetv2": importlib.metadata.version("nnunetv2")},
        "processes": {name: variables[name] for name in ("nnUNet_n_proc_DA", "nnUNet_def_n_proc")},
        "plan": {name: plan[name] for name in ("patch_size", "batch_size", "spacing")},
        "fold": chosen.fold,
        "epochs": chosen.epochs,
        "iterations": chosen.iterations,
        "num_validation_cases": len(summary["metric_per_case"]),
        "seconds": seconds,
        "seconds_from_start_to_predictions": seconds["planning_and_preprocessing"] + whole,
        **rates(marks, chosen.iterations),
        "mean_dice": summary["foreground_mean"]["Dice"],
        "dice": {f"dice/{task.labels[int(label)]}": mean["Dice"] for label, mean in summary["mean"].items()},
        "curve": curve(marks, started, seconds["planning_and_preprocessing"]),
    }
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: result[name] for name in ("seconds", "iterations_per_second", "mean_dice")}))


def environment_of(chosen: argparse.Namespace) -> dict[str, str]:
    """Return the variables that tell nnU-Net where things are and how many processes it may start."""
    cores = str(len(os.sched_getaffinity(0)))
    work = chosen.work.absolute()
    return {
        **os.environ,
        "nnUNet_raw": str(work / "raw"),
        "nnUNet_preprocessed": str(work / "preprocessed"),
        "nnUNet_results": str(work / "results"),
        "nnUNet_n_proc_DA": cores,
        "nnUNet_def_n_proc": cores,
        # As nnUNetv2_train sets them for itself.
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def write_raw(task: Task, folder: Path) -> str:
    """Lay the task's cases out as nnU-Net reads them, as links where the file system has them; return the set's name.

    Raises
    ------
    SystemExit
        For images of several channels, which nnU-Net wants in a file each.
    """
    if task.num_channels != 1:
        sys.exit(f"{task.name} has {task.num_channels} channels in one file; this benchmark handles one")
    name = f"Dataset{NUMBER:03d}_{task.name.partition('_')[2] or task.name}"
    for subfolder in ("imagesTr", "labelsTr"):
        (folder / name / subfolder).mkdir(parents=True)
    for case in task.training:
        link_or_copy(Path(case["image"]), folder / name / "imagesTr" / f"{case['case']}_0000.nii.gz")
        link_or_copy(Path(case["label"]), folder / name / "labelsTr" / f"{case['case']}.nii.gz")
    described = {
        "channel_names": {str(number): modality for number, modality in enumerate(task.modalities)},
        "labels": {label: value for value, label in {**task.labels, 0: "background"}.items()},
        "numTraining": len(task.training),
        "file_ending": ".nii.gz",
    }
    (folder / name / "dataset.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return name


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file; copy it where source and target lie on different file systems."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def planning() -> list[str]:
    """Return the command of nnU-Net's planning and preprocessing."""
    cores = str(len(os.sched_getaffinity(0)))
    entry = "nnunetv2.experiment_planning.plan_and_preprocess_entrypoints"
    return ["-P", "-m", entry, "-d", str(NUMBER), "-c", CONFIGURATION, "-np", cores, "-npfp", cores]


def training(chosen: argparse.Namespace, dataset: str, marks: Path) -> list[str]:
    """Return the command of its training and validation."""
    script = str(Path(__file__).with_name("nnunet_trainer.py"))
    lengths = ("epochs", "iterations", "validation_iterations")
    numbers = [part for name in lengths for part in (f"--{name.replace('_', '-')}", str(getattr(chosen, name)))]
    where = ["--device", chosen.device, "--marks", str(marks)]
    return [script, dataset, CONFIGURATION, str(chosen.fold), *numbers, *where]


def run(arguments: list[str], variables: Mapping[str, str], log: Path) -> float:
    """Run Python with the arguments and return its seconds, from the start of the process.

    Raises
    ------
    SystemExit
        If it fails, with the end of its log.
    """
    begin = time.perf_counter()
    with log.open("wb") as written:
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, stdout=written, stderr=subprocess.STDOUT, env=dict(variables))
    if ended.returncode != 0:
        last = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        sys.exit(f"{shlex.join(arguments)} failed with exit code {ended.returncode}; the end of {log}:\n{last}")
    return time.perf_counter() - begin


def phases(marks: Mapping[str, list[float]], started: float, whole: float) -> dict[str, float]:
    """Return the seconds of the training process by what it did."""
    first, last = marks["training_began"][0], marks["epoch_ended"][-1]
    batches = sum(end - begin for begin, end in zip(marks["training_began"], marks["training_ended"], strict=True))
    return {
        "starting_training": first - started,
        "training_batches": batches,
        "validation_batches_and_checkpoints": last - first - batches,
        "final_validation": whole - (last - started),
    }


def rates(marks: Mapping[str, list[float]], iterations: int) -> dict[str, float]:
    """Return the median speed of an epoch's training batches; the first epoch, which compiles, is left out."""
    epochs = [end - begin for begin, end in zip(marks["training_began"], marks["training_ended"], strict=True)]
    median = statistics.median(epochs[1:] or epochs)
    return {
        "iterations_per_second": iterations / median,
        "milliseconds_per_iteration": 1000 * median / iterations,
        "seconds_first_epoch": epochs[0],
    }


def curve(marks: Mapping[str, list[float]], started: float, before: float) -> list[dict[str, Any]]:
    """Return nnU-Net's pseudo Dice (of patches) after each epoch, by seconds since the start of its planning."""
    rows = zip(marks["epoch_ended"], marks["ema_fg_dice"], marks["mean_fg_dice"], strict=True)
    return [
        {
            "epoch": epoch,
            "seconds": before + ended - started,
            "seconds_without_preprocessing": ended - started,
            "ema_pseudo_dice": average,
            "pseudo_dice": dice,
        }
        for epoch, (ended, average, dice) in enumerate(rows)
    ]


def judged(task: Task, split: Split, predictions: Path) -> Summary:
    """Compare nnU-Net's label maps with the references, as volseg does with its own."""
    references = {case["case"]: case["label"] for case in task.training}
    return summarise(
        [evaluate_files(predictions / f"{name}.nii.gz", references[name], task.labels) for name in split.validation]
    )


if __name__ == "__main__":
    main()
