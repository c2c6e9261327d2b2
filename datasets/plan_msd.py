"""Plan the Decathlon's ten tasks: ``configs/msd/*.yaml``, and the table of ``docs/tasks.md`` beside nnU-Net's plans.

python datasets/plan_msd.py        # the configs; `make docs-text` writes the table

Both follow from the manifests in ``datasets/msd`` by the rules of `volseg.planning`; tests compare them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from volseg.config.catalogue import get_public_task, list_public_tasks
from volseg.files import replacing
from volseg.planning.fingerprint import MOSTLY_ZERO, published_fingerprint
from volseg.planning.plan import Plan, plan, write_config

REPOSITORY = Path(__file__).parents[1]
CONFIGS = REPOSITORY / "configs" / "msd"
TASKS = [public.name for public in list_public_tasks()]


def main() -> None:
    """Write the configs."""
    CONFIGS.mkdir(exist_ok=True)
    for task in TASKS:
        print(write_task_config(task, CONFIGS))


def write_task_config(task: str, folder: Path) -> Path:
    """Write the config of a task, which says at its top what its comments take for the data."""
    path = write_config(plan_task(task), folder / file_name(task), overwrite=True)
    known = (
        f"# volseg train configs/msd/{path.name} --set data.root=DIR/{task}\n"
        "# Made by datasets/plan_msd.py from "
        f"datasets/msd/{task}.yaml: what the comments say of the cases\n"
        "# follows from published medians, as if every case were the median one.\n"
    )
    manifest = get_public_task(task).manifest
    if manifest["nnunet"]["fingerprint"]["mostly_zero"] and "stored" not in manifest:
        known += f"# {MOSTLY_ZERO:.0%} stands for a share that is only known to be below 75 %.\n"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(
        line for line in lines if not line.startswith("# yaml-language-server")
    )  # where it lies on one machine
    with replacing(path) as partial:
        partial.write_text(known + text, encoding="utf-8")
    return path


def plan_task(task: str) -> Plan:
    """Return the plan of a task by what is published of it, for nnU-Net's 8 GiB, so that the two can be compared."""
    return plan(published_fingerprint(task), "unet", root=task, name=file_name(task).removesuffix(".yaml"))


def file_name(task: str) -> str:
    """Return the name of a task's config.

    >>> file_name("Task01_BrainTumour")
    'task01_brain_tumour.yaml'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", task).lower() + ".yaml"


def make_table() -> str:
    """Return the table of all tasks, in Markdown."""
    head = ("task", "spacing (mm)", "patch", "batch", "strides", "kernels", "nnU-Net 2", "MONAI, after nnU-Net 1")
    rows = [head, ["---"] * len(head), *map(make_row, TASKS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def make_row(task: str) -> list[str]:
    """Return what is planned for a task, and what of it others planned differently."""
    manifest, geometry = get_public_task(task).manifest, plan_task(task).geometry
    assert geometry.topology is not None, "a U-Net has a topology"
    ours = {
        "spacing": [float(f"{side:.3g}") for side in geometry.spacing],
        "patch": list(geometry.patch),
        "batch": geometry.batch,
        "strides": [list(of) for of in geometry.topology.strides],
        "kernels": [list(of) for of in geometry.topology.kernels],
    }
    others = [differences(ours, manifest[whose]) for whose in ("nnunet", "plan")]
    return [f"{task[4:6]} {task[7:]}", *(show(value) for value in ours.values()), *others]


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return in words what of a plan is another than ours, to three digits of a spacing; what it leaves open is not."""
    pairs = {key: (value, theirs[key]) for key, value in ours.items() if key in theirs}
    pairs["spacing"] = (ours["spacing"], [float(f"{side:.3g}") for side in theirs["spacing"]])
    return "; ".join(f"{key} {show(other)}" for key, (own, other) in pairs.items() if own != other) or "the same"


def show(value: Any) -> str:
    """Return sides as ``160 x 192 x 64``, strides in short: ``111, 222 x 4``."""
    if not isinstance(value, Sequence):
        return str(value)
    if isinstance(value[0], Sequence):
        return ", ".join(run_lengths("".join(map(str, of)) for of in value))
    return " x ".join(f"{side:g}" for side in value)


def run_lengths(words: Iterator[str]) -> Iterator[str]:
    """Write a word that is repeated once, with how often."""
    for word, same in groupby(words):
        count = len(list(same))
        yield word if count == 1 else f"{word} x {count}"


if __name__ == "__main__":
    main()
