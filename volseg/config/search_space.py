"""Read the search space of a hyperparameter search: for each key a range of numbers, or a list of choices.

::

    optimizer.lr: {low: 1.0e-4, high: 1.0e-1, log: true}
    patch.batch: {low: 2, high: 8, step: 2}
    schedule.name: [polynomial, cosine]
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Self

from pydantic import model_validator

from volseg.config.base import ConfigModel, Finite, validated
from volseg.config.commented import format_inline
from volseg.config.yaml_values import read_yaml
from volseg.errors import ConfigError

EXAMPLE = "optimizer.lr: {low: 1.0e-4, high: 1.0e-1, log: true}"

FIXED = {"output": "each trial has a folder of its own", "name": "it names the search"}
"""Keys that a search cannot set."""


class RangeConfig(ConfigModel):
    """Range of a key's values; whole numbers if ``low``, ``high`` and ``step`` are whole."""

    low: int | Finite
    """Smallest value."""
    high: int | Finite
    """Largest value."""
    log: bool = False
    """Draw uniformly on a logarithmic scale."""
    step: int | Finite | None = None
    """Distance between values, starting at ``low``."""

    @model_validator(mode="after")
    def _holds_numbers(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got low: {self.low} and high: {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError(f"log: true takes low above 0 and no step, got low: {self.low} and step: {self.step}")
        if self.step is not None:
            low, high, step = (Decimal(str(value)) for value in (self.low, self.high, self.step))
            if step <= 0 or (high - low) % step:
                raise ValueError(
                    f"high must be low plus a multiple of step, got low: {low}, high: {high}, step: {step}"
                )
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return all(isinstance(value, int) for value in (self.low, self.high, self.step or 1))

    @property
    def samples(self) -> tuple[int | float, ...]:
        """Both ends and a value between them, since ends such as 2.0 may be whole when other values are not."""
        distance = 1 if self.is_whole else (self.high - self.low) / math.e
        return self.low, self.low + (self.step or distance), self.high


Space = dict[str, RangeConfig | tuple[str, ...]]
"""Keys with ranges, or with choices in the form of ``--set``; a section precedes its keys."""


def read_space(path: str | Path) -> Space:
    """Read the file of ``volseg search --over``, without a check that a config has its keys.

    Raises
    ------
    ConfigError
        If the file is absent or not YAML, or a key has neither a range nor choices.
    """
    try:
        values = read_yaml(Path(path), str(path))
    except OSError as fault:
        raise ConfigError(f"{path} cannot be read: {fault.strerror}; write lines such as {EXAMPLE}") from fault
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path} must hold the keys to search over, in lines such as {EXAMPLE}")
    keys = sorted(values, key=lambda key: str(key).count("."))
    return {str(key): _read_values(str(key), values[key], path) for key in keys}


def list_samples(space: Space) -> Iterator[str]:
    """Yield an override for each choice, and for three values of each range."""
    for key, values in space.items():
        for value in values.samples if isinstance(values, RangeConfig) else values:
            yield f"{key}={value}"


def _read_values(key: str, values: object, path: str | Path) -> RangeConfig | tuple[str, ...]:
    if key in FIXED:
        raise ConfigError(f"{path}: {key} cannot be searched over: {FIXED[key]}")
    if isinstance(values, dict):
        return validated(RangeConfig, values, f"{key} in {path}")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path}: {key} needs a range such as {EXAMPLE}, or a list of choices; got {values!r}")
    choices = tuple(map(format_inline, values))
    if len(set(choices)) < len(choices):
        raise ConfigError(f"{path}: the choices of {key} must differ, got {', '.join(choices)}")
    return choices
