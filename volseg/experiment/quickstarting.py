"""Train a small network on synthetic data, and show its Dice and the next commands; needs no data and no GPU."""

import logging
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from shlex import quote

from volseg.checkpointing.folder import RunFolder
from volseg.commands import spell
from volseg.config.catalogue import shipped_config_path
from volseg.config.loading import load_config, path_override
from volseg.data.synthetic import make_task
from volseg.experiment.prediction.predicting import predict
from volseg.experiment.report import format_outcome
from volseg.experiment.training import train
from volseg.parallel.devices import count_gpus

logger = logging.getLogger(__name__)


def quickstart(output: str | Path | None = None, overrides: Sequence[str] = ()) -> str:
    """Make data, train, validate on unseen cases, and predict cases without labels.

    Parameters
    ----------
    output : path, optional
        Folder of the run; its subfolder ``data`` gets the data. By default ``runs/quickstart``, or
        ``runs/quickstart-2`` and so on if that has a run.
    overrides : sequence of str
        Overrides of its config, such as ``training.epochs=1``.

    Returns
    -------
    str
        Dice per label, the folder of the run, and the next commands.

    Raises
    ------
    ConfigError
        If ``output`` has a run.
    """
    folder = RunFolder(_free_folder() if output is None else Path(output))
    folder.require_free()
    # Logged first: nothing else names the folder to a user who stops the run.
    go_on = spell(f"volseg train {quote(str(folder.config_file))} -o {quote(str(folder.path))} --resume")
    logger.info("data and run lie in %s; once it trains it may be stopped, and goes on by: %s", folder.path, go_on)
    root = make_task(folder.path / "data" / "Task00_Synthetic")
    places = [path_override("data.root", root), path_override("output", folder.path)]
    config = load_config(shipped_config_path("quickstart"), [*overrides, *places])
    outcome = train(config)
    predict(folder, [root / "imagesTs"]).require_all()
    real = "task04_unet" if count_gpus() else "task04_cpu"  # both are shipped with volseg, and found by name
    more = ["volseg data fetch Task04_Hippocampus", f"volseg train {real} --set data.root=Task04_Hippocampus"]
    return "\n  ".join([format_outcome(outcome), *map(spell, more)])


def _free_folder() -> Path:
    candidates = (Path("runs") / ("quickstart" if number == 1 else f"quickstart-{number}") for number in count(1))
    return next(path for path in candidates if not RunFolder(path).exists)
