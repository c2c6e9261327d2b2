"""Where the numbers of a training go: one interface.

A logger of your own derives `Logger`, overrides what it wants to hear of, and is registered as any component is (kind
``logger``). Packages that only one logger needs are imported when that logger is made.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from torch import Tensor

from volseg.errors import ConfigError
from volseg.monitoring.run_files import HISTORY, EpochLine, append_history, begin_history

__all__ = ["History", "LoggedRun", "Logger", "flatten", "import_package"]


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a logger is told of a training before its first number."""

    name: str
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    """The same for all parts of a training that was resumed."""
    folder: Path | None = None
    """The run folder; None for a `Training` of your own that has none."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Every setting, as plain values, in sections as the YAML file has them."""
    batches: int = 0
    """Of an epoch."""
    epoch: int = 0
    """Epochs that are done, after which numbers come: more than 0 where a training goes on."""

    def require_folder(self, logger: str) -> Path:
        """Return the run folder, or raise a `ConfigError` where the training has none."""
        if self.folder is None:
            raise ConfigError(f"logger {logger} writes into the run folder, and this training has none; give it a path")
        return self.folder


class Logger:
    """Hear of a training; override what is of interest.

    All is called in the process that leads the job, and in no other one. What is raised before the first batch ends the
    training; later it is told once, the logger is ended, and the training goes on without it.
    """

    def begin(self, run: LoggedRun) -> None:
        """Before the first batch, also of a training that goes on: numbers past ``run.epoch`` come again."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """After each epoch, its numbers by tag; ``step`` is the epoch, counted from 1."""

    def images(self, pictures: Mapping[str, Tensor], step: int) -> None:
        """After each validation, pictures by tag: ``(3, height, width)``, uint8."""

    def text(self, name: str, text: str) -> None:
        """Texts by name, in Markdown: the network, the config."""

    def end(self, scores: Mapping[str, float]) -> None:
        """When nothing more comes: the final scores by tag, none where the training did not reach its end.

        Called once for every `begin` that went well, also after a fault of the logger itself.
        """


class History(Logger):
    """The numbers of each epoch as a line of JSON; ``history.jsonl`` of a run folder.

    Parameters
    ----------
    file : path, optional
        In place of the run folder's.
    """

    def __init__(self, file: str | Path | None = None) -> None:
        self.file = None if file is None else Path(file)
        self._batches = 0
        self._lines: TextIO | None = None

    def begin(self, run: LoggedRun) -> None:
        """Drop the lines of epochs that are trained again."""
        self._batches = run.batches
        # Found anew for every training: a logger that hears of a second one leaves the first one's file alone.
        file = run.require_folder("history") / HISTORY if self.file is None else self.file
        file.parent.mkdir(parents=True, exist_ok=True)
        begin_history(file, run.epoch)
        # Held open: a folder that was taken away, and is another run's by now, gets no line of this one.
        self._lines = file.open("a", encoding="utf-8")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add an epoch."""
        assert self._lines is not None, "begin was not called"
        line = EpochLine(epoch=step, step=step * self._batches, time=time.time(), scalars=dict(values))
        append_history(self._lines, line)

    def end(self, scores: Mapping[str, float]) -> None:
        """Close the file."""
        del scores
        if self._lines is not None:
            self._lines.close()


def import_package(name: str, *, distribution: str) -> Any:
    """Return a package that volseg does not depend on.

    Raises
    ------
    ConfigError
        If it is not installed: how to install it.
    """
    try:
        return import_module(name)
    except ImportError as fault:
        raise ConfigError(
            f"the package {name} is needed ({fault}); install it by: pip install {distribution}"
        ) from fault


def flatten(settings: Mapping[str, Any], path: str = "") -> dict[str, bool | int | float | str]:
    """Return nested settings by dotted names, with values that every logger shows.

    >>> flatten({"name": "a", "patch": {"size": (8, 8, 8)}, "losses": [{"name": "Dice"}], "clip": None})
    {'name': 'a', 'patch.size': '(8, 8, 8)', 'losses.0.name': 'Dice', 'clip': 'None'}
    """
    flat: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, Sequence) and value and all(isinstance(one, Mapping) for one in value):
            flat |= flatten({str(number): one for number, one in enumerate(value)}, f"{name}.")
        else:
            flat[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
