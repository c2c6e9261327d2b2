"""Load a config from a YAML file and ``--set`` overrides, and write it to a file that loads as the same config.

The search space of a hyperparameter search is another file: for each key a range of numbers, or a list of choices::

    optimizer.lr: {low: 1.0e-4, high: 1.0e-1, log: true}
    patch.batch: {low: 2, high: 8, step: 2}
    schedule.name: [polynomial, cosine]
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, model_validator

from volseg.config.base import ComponentConfig, ConfigModel, Finite, require_sound_parts, validated
from volseg.config.catalogue import list_shipped
from volseg.config.nearest import did_you_mean, find_near_path
from volseg.config.schema import ExperimentConfig
from volseg.config.yaml_values import DEEPEST, dump_yaml, parse_yaml, read_yaml
from volseg.errors import ConfigError
from volseg.files import replacing


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read a YAML config and apply overrides.

    Parameters
    ----------
    path : path
        YAML file; if it does not exist, the name of a config that comes with volseg, such as ``task04_unet``.
    overrides : sequence of str
        Dotted keys with YAML values, such as ``training.epochs=5``; a number in the key indexes a list.

    Raises
    ------
    ConfigError
        If the file is absent, is not a YAML mapping, or does not fit the schema; names the key and the nearest one.
    """
    return build_config(read_config(path), overrides, path)


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the unchecked values of a config's YAML file; see `load_config`.

    Raises
    ------
    ConfigError
        If the file is absent, is not a YAML mapping, or has no key of a config.
    """
    file = Path(path)
    if not file.exists() and (shipped := list_shipped().get(str(path))) is not None:
        file = shipped
    try:
        values = read_yaml(file, f"config {path}")
    except OSError as fault:
        raise ConfigError(f"config {path} cannot be read: {fault.strerror}; {_name_configs(Path(path))}") from fault
    if not isinstance(values, dict):
        came = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"config {path} needs `key: value` lines, got {came}; volseg configure FOLDER writes one")
    if values and not {*values} & {*ExperimentConfig.model_fields}.difference({"name", "training"}):
        raise ConfigError(
            f"{path} is not a volseg config: it has the keys {', '.join(sorted(map(str, values))[:6])}; name a config, "
            f"or the folder of a data set, such as {Path(path).parent}"
        )
    return values


def build_config(values: Mapping[str, Any], overrides: Sequence[str], path: str | Path) -> ExperimentConfig:
    """Return the checked config from the values that `read_config` read from ``path``, with overrides.

    Raises
    ------
    ConfigError
        If the values do not fit the schema; names the key and the nearest known key.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    for assignment in overrides:
        values = override(values, assignment)
    changed = " with " + " ".join(f"--set {assignment}" for assignment in overrides) if overrides else ""
    return validated(ExperimentConfig, values, f"{path}{changed}")


def is_config_file(path: str | Path) -> bool:
    """Return whether a path is a YAML file, or the name of a config that comes with volseg."""
    file = Path(path)
    return (file.suffix in (".yaml", ".yml") and file.is_file()) or (not file.exists() and str(path) in list_shipped())


def _name_configs(path: Path) -> str:
    """Return advice on which config to name instead of an unreadable file."""
    if (path / "config.yaml").is_file():
        return f"it is a run folder; its config is {path / 'config.yaml'}"
    near = find_near_path(path)
    own = "name a YAML file" if near is None else f"did you mean {str(near)!r}?"
    return f"{own}, or a config that comes with volseg: {did_you_mean(path.stem, list_shipped())}"


def require_config(config: ExperimentConfig | str | Path) -> ExperimentConfig:
    """Return a config, loaded if a path is given.

    Raises
    ------
    ConfigError
        As `load_config`, and if the value is neither a config nor a path.
    """
    if isinstance(config, ExperimentConfig):
        return config
    if not isinstance(config, str | Path):
        raise ConfigError(f"needed: a config from `volseg.load_config`, or the path of a YAML file; got {config!r}")
    return load_config(config)


def override(values: Mapping[str, Any], assignment: str) -> dict[str, Any]:
    """Return ``values`` with one ``a.b=v`` applied; ``v`` is YAML, and a number in the key indexes a list.

    >>> override({"training": {"epochs": 9}}, "training.epochs=5")
    {'training': {'epochs': 5}}
    """
    path, equals, text = str(assignment).partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or len(keys) > DEEPEST:
        raise ConfigError(f"--set needs key=value, such as training.epochs=5, got {assignment[:200]!r}")
    value = parse_yaml(text, f"--set {assignment}: the value")
    result = _assigned(values, keys, value, assignment)
    assert isinstance(result, dict)
    return result


def require_sound_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values that overrides set, before the config exists.

    Raises
    ------
    ConfigError
        If an override sets an unknown key, or a value that its key never accepts.
    """
    values: dict[str, Any] = {}
    for assignment in overrides:
        values = override(values, assignment)
    require_sound_parts(ExperimentConfig, values, "--set")
    return values


def path_override(key: str, path: str | Path) -> str:
    """Return the override that sets ``key`` to a path, quoted so that YAML reads a string.

    >>> path_override("output", Path("2024-05-01"))
    'output="2024-05-01"'

    Raises
    ------
    ConfigError
        If the path is not text in the locale's encoding, since a config cannot store it.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
        raise ConfigError(
            f"{key} {str(path)!r} cannot be encoded in this locale; set LC_ALL=C.UTF-8, or choose another name"
        )
    return f"{key}={json.dumps(str(path), ensure_ascii=False)}"  # a JSON string is a YAML string


def _assigned(node: Any, keys: Sequence[str], value: Any, assignment: str) -> Any:
    """Return a copy of ``node`` with ``value`` at ``keys``."""
    if not keys:
        return value
    key, *rest = keys
    if isinstance(node, list | tuple):
        if key not in map(str, range(len(node))):
            raise ConfigError(f"--set {assignment}: {key!r} must be an index below {len(node)}")
        return [_assigned(item, rest, value, assignment) if i == int(key) else item for i, item in enumerate(node)]
    if node is None:
        node = {}
    if not isinstance(node, Mapping):
        raise ConfigError(f"--set {assignment}: {key!r} cannot be set in {node!r}, which is not a section")
    return {**node, key: _assigned(node.get(key), rest, value, assignment)}


def dump_config(config: ExperimentConfig, path: str | Path) -> Path:
    """Write every value of ``config``, including defaults, atomically; `load_config` reads the same config."""
    path = Path(path)
    with replacing(path) as partial:
        partial.write_text(format_config(config), encoding="utf-8")
    return path


def format_config(config: ExperimentConfig) -> str:
    """Return every value of ``config``, including defaults, as YAML."""
    return dump_yaml(config.model_dump(mode="json"))


def differences(one: ExperimentConfig, other: ExperimentConfig) -> list[str]:
    """Return each dotted key in which two configs differ, with both values.

    >>> from volseg.config.sections import PatchConfig, DataConfig
    >>> config = ExperimentConfig(
    ...     name="a", data=DataConfig(root="x"), patch=PatchConfig(size=(8, 8, 8)),
    ...     network={"name": "VNet"}, optimizer={"name": "SGD", "lr": 0.1})
    >>> differences(config, config.model_copy(update={"seed": 1}))
    ['seed: 12345 -> 1']
    """
    return _differences(one.model_dump(mode="json"), other.model_dump(mode="json"), "")


def _differences(one: Any, other: Any, path: str) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [
            line
            for key in keys
            for line in _differences(one.get(key), other.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if one == other else [f"{path}: {one} -> {other}"]


def format_inline(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = dump_yaml(_as_plain(value), default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").rstrip("\n")


def _as_plain(value: Any) -> Any:
    if isinstance(value, ComponentConfig):  # only what differs from the defaults
        return {"name": value.name} | value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


EXAMPLE = "optimizer.lr: {low: 1.0e-4, high: 1.0e-1, log: true}"

FIXED = {"output": "each trial has its own folder", "name": "it is the name of the search"}
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
            raise ValueError(f"log: true needs low above 0 and no step, got low: {self.low} and step: {self.step}")
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
        raise ConfigError(f"{path} must contain the keys to search over, in lines such as {EXAMPLE}")
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
