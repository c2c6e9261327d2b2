"""The first thing to try: synthetic data, a small network, its Dice, and what to type next; no data, no GPU needed."""

from itertools import count
from pathlib import Path

from volseg.config.loading import load_config, path_override
from volseg.data.synthetic import make_task
from volseg.experiment.predicting import predict
from volseg.experiment.report import closing_words
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.training import train

__all__ = ["quickstart"]


def quickstart(output: Path | None = None) -> str:
    """Make data, train, validate on unseen cases, predict cases without labels.

    Parameters
    ----------
    output : Path, optional
        Folder for the run; data are made in its folder ``data``. By default ``runs/quickstart``, or
        ``runs/quickstart-2`` and so on where that holds a run.

    Returns
    -------
    str
        Dice per label, the folder of the run, and the commands to type next.

    Raises
    ------
    ConfigError
        If ``output`` holds a run already.
    """
    folder = RunFolder(_free_folder() if output is None else output)
    folder.require_free()
    root = make_task(folder.path / "data" / "Task00_Synthetic")
    config = load_config(_config_file(), [path_override("data.root", root), path_override("output", folder.path)])
    outcome = train(config)
    predict(folder, [root / "imagesTs"]).require_all()
    return f"{closing_words(outcome)}\n  volseg train configs/task04_unet.yaml --set data.root=DIR/Task04_Hippocampus"


def _free_folder() -> Path:
    candidates = (Path("runs") / ("quickstart" if number == 1 else f"quickstart-{number}") for number in count(1))
    return next(path for path in candidates if not RunFolder(path).exists)


def _config_file() -> Path:
    """Return ``quickstart.yaml``: beside this file where volseg is installed, else in the source tree's configs."""
    installed = Path(__file__).with_name("quickstart.yaml")
    return installed if installed.exists() else Path(__file__).parents[2] / "configs" / "quickstart.yaml"
