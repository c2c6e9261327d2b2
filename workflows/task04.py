"""Train and validate Task04 with a config of the repository: `volseg train` in Python.

python workflows/task04.py DIR/Task04_Hippocampus                      # a small U-Net for a CPU
python workflows/task04.py DIR/Task04_Hippocampus configs/task04_unet.yaml --set training.epochs=50

To get the data: ``volseg data fetch Task04_Hippocampus``.
"""

import argparse

from volseg.experiment import format_outcome, load_config, train


def main() -> None:
    """Train, and print the Dice of the cases that the network did not see."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("root", help="the task's folder")
    arguments.add_argument("config", nargs="?", default="configs/task04_cpu.yaml")
    arguments.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the config"
    )
    given = arguments.parse_args()

    outcome = train(load_config(given.config, [f"data.root={given.root}", *given.set]))
    print(format_outcome(outcome))


if __name__ == "__main__":
    main()
