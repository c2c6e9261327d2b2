"""How long an epoch's steps take, and what they cost."""

from dataclasses import dataclass

from volseg.errors import ConfigError
from volseg.forecast.instances import Instance

__all__ = ["EpochForecast", "find_epoch"]


@dataclass(frozen=True, kw_only=True)
class EpochForecast:
    """An epoch's training steps: validation, checkpoints and the start of the training come on top."""

    batches: int
    seconds: float
    price: float | None
    """US dollars; None where no machine is named, or where it has no price."""


def find_epoch(seconds_per_batch: float, batches: int, instance: Instance | None = None) -> EpochForecast:
    """Return what an epoch takes.

    Parameters
    ----------
    seconds_per_batch
        Of a step; where several batches make one, of one of them.
    batches
        Of an epoch: ``training.iterations``.
    instance
        The machine that is paid for.
    """
    if batches < 1 or not seconds_per_batch >= 0:
        raise ConfigError(
            f"an epoch has at least one batch, which takes no less than 0 s; got {batches}, {seconds_per_batch} s"
        )
    seconds = batches * seconds_per_batch
    return EpochForecast(batches=batches, seconds=seconds, price=instance.price(seconds) if instance else None)
