"""Train a V-Net on MSD Task04 Hippocampus in plain Python: what `volseg train configs/task04_vnet.yaml` does.

python workflows/train_task04.py DIR/Task04_Hippocampus --epochs 20
"""

import argparse
from pathlib import Path

import torch
from monai.losses import DiceCELoss

from volseg import Checkpoints, Named, Predictor, Training, Validation
from volseg.config.augmentation import AugmentationConfig
from volseg.data.augmented import AugmentedBatches
from volseg.data.bank import CaseBank
from volseg.data.layouts import load_task
from volseg.data.patches import PatchBatches
from volseg.data.preparing import prepare_all
from volseg.data.splits import folds
from volseg.models import FitGrid, build_network
from volseg.monitoring.progress import Progress
from volseg.monitoring.tensorboard import TensorBoard
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.preprocessing import build_preprocessing
from volseg.workflow.schedules import cosine

PATCH, BATCH, SEED = (32, 48, 32), 8, 12345


def main() -> None:
    """Train on fold 0 and write the validation's predictions and summary."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("root", type=Path, help="the task's folder")
    arguments.add_argument("--output", type=Path, default=Path("runs/train_task04"))
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--iterations", type=int, default=250, help="batches per epoch")
    chosen = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)

    # Cases: nnU-Net's fold 0, oriented, 1 mm, z-scored.
    task = load_task(chosen.root)
    cases = {case["case"]: case for case in task.training}
    split = folds(cases)[0]
    prepare = build_preprocessing(
        [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1, 1, 1]}, {"name": "ZScore"}]
    )
    training_cases = prepare_all([cases[name] for name in split.training], prepare)
    validation_cases = prepare_all([cases[name] for name in split.validation], prepare, keep_reference=True)

    # Batches: patches augmented on the training device.
    augmentation = BatchAugmentation(AugmentationConfig(), PATCH, num_classes=task.num_classes)
    patches = PatchBatches(
        CaseBank(training_cases, device=device),
        PATCH,
        batch_size=BATCH,
        iterations=chosen.iterations,
        source_size=augmentation.source_size,
        seed=SEED,
    )
    batches = AugmentedBatches(patches, augmentation, seed=SEED, device=device)

    # The model, and the workflows that train and judge it. Fields bind by name.
    network = build_network({"name": "VNet"}, in_channels=task.num_channels, out_channels=task.num_classes)
    model = FitGrid(network).to(device)
    predictor = Predictor(model=model, num_classes=task.num_classes)
    training = Training(
        Named(model, inputs=["image"], outputs=["logits"]),
        Named(DiceCELoss(to_onehot_y=True, softmax=True), inputs=["logits", "label"], outputs=["loss"]),
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2),
        batches,
        epochs=chosen.epochs,
        schedule=cosine,
        warmup=0.02,
        clip=12,
        average_decay=0.999,
        validation=Validation(predictor, validation_cases, task.labels),
        validate_every=10,
        hooks=[Progress(), TensorBoard(chosen.output / "tensorboard"), Checkpoints(chosen.output / "checkpoints")],
    )
    training.run()

    final = Validation(predictor, validation_cases, task.labels, folder=chosen.output / "validation")
    for name, dice in training.validate(final).scores.items():
        print(f"{name}: {dice:.4f}")


if __name__ == "__main__":
    main()
