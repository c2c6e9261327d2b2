"""Train on a task of the Decathlon in plain Python, like `volseg train configs/msd/taskNN_*.yaml`.

python workflows/train_msd.py --task 9 --root DIR/Task09_Spleen

The plan follows nnU-Net's rules and the published facts of the task. Any step can be replaced.
"""

import argparse
from pathlib import Path

import torch

from volseg import Checkpoints, Named, Predictor, Progress, TensorBoard, Training, TrainingLog, Validation, load_task
from volseg.data.augmented import AugmentedBatches
from volseg.data.case_store.preprocessed import prepare_all
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.cases import folds
from volseg.data.patches import PatchBatches
from volseg.models import FitGrid, build_network
from volseg.planning import PRESETS, plan
from volseg.planning.fingerprint import published_fingerprint
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.preprocessing import build_preprocessing
from volseg.workflow import load_checkpoint
from volseg.workflow.components import build_loss
from volseg.workflow.schedules import cosine


def main() -> None:
    """Train on fold 0 and write the validation's predictions and summary."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--task", required=True, help="number or name: 9, Task09_Spleen")
    arguments.add_argument("--root", type=Path, help="the task's folder; default its name")
    arguments.add_argument("--preset", default="unet", choices=[name for name in PRESETS if name != "whole"])
    arguments.add_argument("--gpu-memory", type=float, default=8.0, help="GiB to plan for")
    arguments.add_argument("--output", type=Path, help="default runs/train_TASK")
    arguments.add_argument("--epochs", type=int, default=100)
    arguments.add_argument("--iterations", type=int, default=250, help="batches per epoch")
    arguments.add_argument("--patch", type=int, nargs=3, metavar=("D", "H", "W"), help="sides; default: planned")
    chosen = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # The plan: spacing, patch, batch and network.
    planned = plan(published_fingerprint(chosen.task), chosen.preset, chosen.gpu_memory)
    config, spacing = planned.config(), planned.geometry.spacing
    patch = tuple(chosen.patch or config.patch.size)
    output = chosen.output or Path("runs") / f"train_{planned.fingerprint.task.lower()}"
    torch.manual_seed(config.seed)

    # Cases: nnU-Net's fold 0, on one grid and one scale.
    task = load_task(chosen.root or Path(planned.fingerprint.task))
    cases = {case["case"]: case for case in task.training}
    split = folds(cases)[0]
    prepare = build_preprocessing([step.spec() for step in config.preprocessing])
    training_cases = prepare_all([cases[name] for name in split.training], prepare)
    validation_cases = prepare_all([cases[name] for name in split.validation], prepare, keep_reference=True)

    # Batches: patches augmented on the training device, rotated in mm.
    augmentation = BatchAugmentation(config.augmentation, patch, num_classes=task.num_classes, spacing=spacing)
    patches = PatchBatches(
        VolumeCache(training_cases, device=device),
        patch,
        batch_size=config.patch.batch,
        iterations=chosen.iterations,
        source_size=augmentation.source_size,
        seed=config.seed,
    )
    batches = AugmentedBatches(patches, augmentation, seed=config.seed, device=device)

    # The model, and the workflows that train and validate it. Fields are bound by name.
    network = build_network(config.network.spec(), in_channels=task.num_channels, out_channels=task.num_classes)
    model = FitGrid(network).to(device)
    predictor = Predictor(model=model, num_classes=task.num_classes, window=patch)
    training = Training(
        Named(model, inputs=["image"], outputs=["logits"]),
        build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss"),  # MONAI's, at each depth
        torch.optim.AdamW(model.parameters(), lr=config.optimizer.spec()["lr"], weight_decay=1e-2),
        batches,
        epochs=chosen.epochs,
        schedule=cosine,
        warmup=config.schedule.warmup,
        clip=12,
        average_decay=0.999,
        validation=Validation(predictor, validation_cases, task.labels),
        validate_every=10,
        hooks=[Progress(), TrainingLog([TensorBoard(output / "tensorboard")]), Checkpoints(output / "checkpoints")],
    )
    latest = output / "checkpoints" / "latest.pt"
    if latest.exists():  # the script was stopped: continue at the next batch
        training.load_state_dict(load_checkpoint(latest))
    training.run()

    final = Validation(predictor, validation_cases, task.labels, folder=output / "validation")
    for name, dice in training.validate(final).scores.items():
        print(f"{name}: {dice:.4f}")


if __name__ == "__main__":
    main()
