"""Train and validate one fold by nnU-Net's own trainer, over fewer epochs; started by ``nnunet.py``.

This is what ``nnUNetv2_train`` does. It is not used because it looks a trainer's name up by importing every trainer
there is, which takes longer, and needs more packages, than its own trainer does.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from batchgenerators.utilities.file_and_folder_operations import load_json
from nnunetv2.paths import nnUNet_preprocessed
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

DICE = ("ema_fg_dice", "mean_fg_dice")
"""nnU-Net's running average over epochs, and an epoch's own."""


class TimedTrainer(nnUNetTrainer):
    """nnU-Net's trainer; it also writes down when things happened (seconds since 1970).

    The signature is nnU-Net's, which looks the names of its arguments up.
    """

    def __init__(
        self,
        plans: dict,
        configuration: str,
        fold: int,
        dataset_json: dict,
        device: torch.device = torch.device("cuda"),  # noqa: B008
    ) -> None:
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.marks: dict[str, list[float]] = {"training_began": [], "training_ended": [], "epoch_ended": []}

    def on_train_epoch_start(self) -> None:
        """Take the time after nnU-Net's own preparations."""
        super().on_train_epoch_start()
        self.marks["training_began"].append(time.time())

    def on_train_epoch_end(self, train_outputs: list[dict]) -> None:
        """Take the time of the last batch; nnU-Net waits for each batch's loss, so the device has finished."""
        self.marks["training_ended"].append(time.time())
        super().on_train_epoch_end(train_outputs)

    def on_epoch_end(self) -> None:
        """Take the time after validation batches and checkpoints."""
        super().on_epoch_end()
        self.marks["epoch_ended"].append(time.time())


def main() -> None:
    """Train, validate, and write the times down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="DatasetNNN_Name, preprocessed")
    parser.add_argument("configuration")
    parser.add_argument("fold", type=int)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--validation-iterations", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--marks", type=Path, required=True, help="file for the times and the Dice of the epochs")
    chosen = parser.parse_args()
    if chosen.device == "cuda":  # as nnUNetv2_train
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        torch.backends.cudnn.benchmark = True
    folder = Path(nnUNet_preprocessed) / chosen.dataset
    trainer = TimedTrainer(
        plans={**load_json(str(folder / "nnUNetPlans.json")), "continue_training": False},
        configuration=chosen.configuration,
        fold=chosen.fold,
        dataset_json=load_json(str(folder / "dataset.json")),
        device=torch.device(chosen.device),
    )
    trainer.num_epochs = chosen.epochs  # its schedule is made of it later, in initialize()
    trainer.num_iterations_per_epoch = chosen.iterations
    trainer.num_val_iterations_per_epoch = chosen.validation_iterations
    trainer.run_training()
    trainer.perform_actual_validation()
    dice = {name: [float(value) for value in trainer.logger.get_value(name, None)] for name in DICE}
    written = {**trainer.marks, **dice, "output_folder": str(trainer.output_folder)}
    chosen.marks.write_text(json.dumps(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
