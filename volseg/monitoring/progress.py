"""One bar for a whole training, and one for any list of cases being worked on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

from volseg.monitoring.console import open_bar
from volseg.workflow.hooks import Hook
from volseg.workflow.records import EpochRecord
from volseg.workflow.training import Training

__all__ = ["Progress", "count_up", "progress", "show_bytes"]

Item = TypeVar("Item")


def progress(items: Iterable[Item], title: str, total: int | None = None) -> Iterator[Item]:
    """Yield ``items`` while a bar called ``title`` counts them."""
    yield from open_bar(items, desc=title, total=total, unit="case", leave=True)


@contextmanager
def count_up(total: int, title: str, *, done: int = 0) -> Iterator[Callable[[], object]]:
    """Give a function to call after each of ``total`` cases, ``done`` of them before, whose loop lies elsewhere."""
    with open_bar(total=total, initial=done, desc=title, unit="case") as bar:
        yield bar.update


@contextmanager
def show_bytes() -> Iterator[Callable[[str, int, int | None], None]]:
    """Give a function to call with what is being done, how many bytes of it are, and of how many: a bar for each."""
    bar: tqdm[Any] | None = None

    def show(title: str, done: int, total: int | None) -> None:
        nonlocal bar
        if bar is None or bar.desc != f"{title}: ":
            if bar is not None:
                bar.close()
            bar = open_bar(desc=title, total=total, initial=done, unit="B", unit_scale=True, unit_divisor=1024)
        bar.total = total
        bar.update(done - bar.n)  # less than before, where a server begins anew

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


class Progress(Hook):
    """A bar over every batch of the training, with the loss and the best score so far.

    The loss shown is the one the training looked at last; the bar itself never waits for the device.
    """

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def on_training_begin(self, training: Training) -> None:
        """Open the bar where the training stands."""
        if not training.is_main_process:
            return
        done = training.epoch * training.num_batches + training.position
        total = training.epochs * training.num_batches
        self._bar = open_bar(total=total, initial=done, desc="training", unit="batch")

    def on_batch_end(self, training: Training, fields: Mapping[str, Any]) -> None:
        """Count the batch."""
        del fields
        if self._bar is None:
            return
        self._bar.update()
        if training.latest_losses:
            self._bar.set_postfix(self._numbers(training), refresh=False)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Show the newest score."""
        del record
        if self._bar is not None:
            self._bar.set_postfix(self._numbers(training))

    def on_training_end(self, training: Training) -> None:
        """Close the bar."""
        del training
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @staticmethod
    def _numbers(training: Training) -> dict[str, str]:
        numbers = {"epoch": f"{min(training.epoch + 1, training.epochs)}/{training.epochs}"}
        numbers |= {name: f"{value:.3f}" for name, value in training.latest_losses.items()}
        if training.best is not None and training.best.score is not None:
            numbers["best Dice"] = f"{training.best.score:.4f}"
        return numbers
