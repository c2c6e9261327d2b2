"""Train every fold of a config, and predict images with all of them together.

python workflows/cross_validation.py configs/task04_cpu.yaml DIR/Task04_Hippocampus --gpus 4

Each case is validated by the network that did not train on it; other images are predicted by the mean.
"""

import argparse
from pathlib import Path

from volseg.experiment import cross_validate, determine_postprocessing, load_config, predict


def main() -> None:
    """Train the folds that are not finished, print their table, and predict the test images."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("config")
    arguments.add_argument("root", type=Path, help="the task's folder")
    arguments.add_argument("--gpus", type=int, default=1, help="number of folds to train at a time; default one")
    arguments.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the config"
    )
    given = arguments.parse_args()

    config = load_config(given.config, [f"data.root={given.root}", *given.set])
    crossed = cross_validate(config, gpus=given.gpus, resume=True)
    for label in crossed.labels:
        low, high = label.over_cases.low, label.over_cases.high
        print(f"{label.name}: Dice {label.over_cases.mean:.4f} ({low:.4f} to {high:.4f})")

    # Choose steps that raise Dice on the validation cases, such as keeping the largest component; predictions use them.
    determine_postprocessing(config.folder)
    print(predict(config.folder, [given.root / "imagesTs"], config.folder / "predictions").table())


if __name__ == "__main__":
    main()
