"""Check, plan, train and predict any task of the Decathlon, or any other data set: the verbs of `volseg` in Python.

python workflows/msd_task.py DIR/Task09_Spleen --preset unet --gpu-memory 8
"""

import argparse
from pathlib import Path

from volseg.data import check_task, load_task
from volseg.experiment import configure, format_outcome, load_config, predict, train
from volseg.planning.geometry import PRESETS
from volseg.planning.plan import write_config


def main() -> None:
    """Check, plan and train on a folder of cases, and predict its test images."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("root", type=Path, help="the task's folder")
    arguments.add_argument("--preset", default="unet", choices=list(PRESETS))
    arguments.add_argument("--gpu-memory", type=float, default=8.0, help="GiB to plan for")
    arguments.add_argument("--output", type=Path, help="default runs/TASK")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a planned value")
    given = arguments.parse_args()

    # Check the cases before planning from them.
    task = load_task(given.root)
    output = given.output or Path("runs") / task.name
    checked = check_task(task)
    for finding in [*checked.problems, *checked.remarks]:
        print(finding)

    # Write a config in which each value is commented with its reason.
    planned = configure(given.root, preset=given.preset, gpu_memory=given.gpu_memory)
    output.parent.mkdir(parents=True, exist_ok=True)
    config = output.with_suffix(".yaml")
    write_config(planned, config)

    outcome = train(load_config(config, [f"output={output}", *given.set]))
    print(format_outcome(outcome))

    if task.test:
        print(predict(output, [given.root / "imagesTs"], output / "predictions").table())


if __name__ == "__main__":
    main()
