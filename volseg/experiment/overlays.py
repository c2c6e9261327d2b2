"""Pictures of the best and the worst validated cases, made while the data are there: reports may be written later."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from volseg.checkpointing.folder import RunFolder
from volseg.data.cases import Case, Task
from volseg.data.checks import read_case
from volseg.data.readers import read_volume
from volseg.data.threads import map_in_threads
from volseg.files import replacing
from volseg.monitoring.pictures import draw_example
from volseg.reporting.reading import OVERLAYS, read_scores
from volseg.reporting.scores import choose_extremes
from volseg.workflow.validation import Example, make_example

__all__ = ["draw_overlays"]

logger = logging.getLogger(__name__)

MIN_SIDE = 384
"""Of a picture in pixels: ten of them are to make a page that can be sent."""

THREADS = 2
"""That draw; each holds a case in memory."""


def draw_overlays(folder: RunFolder, task: Task, cases: Sequence[Case], *, channel: int = 0) -> list[Path]:
    """Draw the cases with the lowest and the highest Dice of a run's validation; return the files.

    Parameters
    ----------
    folder : RunFolder
        With ``validation/summary.json`` and the label maps that it is about.
    task : Task
        Of the run.
    cases : sequence of Case
        Those that were validated: prepared where this process holds them, else with the paths of image and label, which
        are read again. Of several with one id the last counts.
    channel : int
        Of the images, which is drawn.
    """
    target = folder.path / OVERLAYS
    for old in target.glob("*.png"):
        old.unlink()
    scores = read_scores(folder.validation / "summary.json", None)
    if scores is None:
        return []
    by_name = {case["case"]: case for case in cases}
    worst, best = choose_extremes(scores.cases)
    draw = partial(_draw, folder, task, target, channel)
    # By two threads: compressing a picture, and most of drawing it, waits for no other Python.
    drawn = map_in_threads(draw, [by_name[judged.name] for judged in (*worst, *best)], THREADS)
    return [file for file in drawn if file is not None]


def _draw(folder: RunFolder, task: Task, target: Path, channel: int, case: Case) -> Path | None:
    """Draw one case; return the file, or None where there is nothing left to draw."""
    example = _read_example(folder, task, case)
    if example is None:
        return None
    picture = draw_example(example, channel=channel, min_side=MIN_SIDE).permute(1, 2, 0).numpy()
    file = target / f"{case['case']}.png"
    with replacing(file) as partly:
        # Not optimize=True, which took ten times as long, 4 s for ten pictures, and left out an eighth.
        Image.fromarray(np.ascontiguousarray(picture)).save(partly, "PNG")
    return file


def _read_example(folder: RunFolder, task: Task, case: Case) -> Example | None:
    """Return image, label and prediction of a case; None, with a line in the log, where they can no longer be read."""
    if "reference" not in case:
        checked = read_case(case, task, digests=False)
        if checked.problems:
            logger.warning("no picture of %s: %s", case["case"], checked.problems[0])
            return None
        case = {**checked.case, "reference": checked.case["label"]}
    prediction = read_volume(folder.validation / f"{case['case']}.nii.gz")
    known = {0, *task.class_values, *(value for key in task.structures for value in _list_values(key))}
    return make_example(case, prediction, known, task.ignore)


def _list_values(key: int | tuple[int, ...]) -> tuple[int, ...]:
    return key if isinstance(key, tuple) else (key,)
