"""A config to begin with, written out with all that can be said of it; and the schema with every component's name."""

import json
from pathlib import Path
from typing import Any

from volseg.config.commented import write_commented
from volseg.config.json_schema import KINDS, KINDS_OF_FIELDS, describe_config, refer_to_schema
from volseg.config.loading import load_config
from volseg.config.schema import ExperimentConfig
from volseg.config.shipped import find_shipped
from volseg.experiment.own_components import REGISTRIES
from volseg.files import replacing, require_new

__all__ = ["config_schema", "init_config", "write_schema"]

PLAIN: dict[str, Any] = {
    "name": "my_training",
    "data": {"root": "DATA"},
    "patch": {"size": (96, 96, 96)},
    "network": {"name": "DynUNet", "deep_supervision": True},
    "optimizer": {"name": "AdamW", "lr": 3e-3, "weight_decay": 1e-2},
}
"""What has no default."""


def init_config(
    output: str | Path,
    *,
    data: str | Path | None = None,
    like: str | None = None,
    minimal: bool = False,
    overwrite: bool = False,
) -> ExperimentConfig:
    """Write a config to begin with: every value, its meaning, its bounds and its alternatives.

    Parameters
    ----------
    output
        The file.
    data
        Of the data set, in place of a word to be replaced.
    like
        Name of a config that comes with volseg, whose values are taken.
    minimal
        Write only what differs from the defaults.
    overwrite
        Replace a file that is there.

    Raises
    ------
    ConfigError
        If there is a file and ``overwrite`` is off, or nothing like ``like``.
    """
    output = Path(output)
    require_new(output, overwrite=overwrite)
    config = load_config(find_shipped(like)) if like is not None else ExperimentConfig.model_validate(PLAIN)
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"root": Path(data)})})
    head = [
        refer_to_schema(),
        f"# volseg train {output}",
        "# What stands here is the default where no comment names another one, and may be left out. `volseg configure",
        "# DATA -o FILE` looks at the images of a data set, and says why each value is what it is.",
    ]
    write_commented(config, output, head=head, minimal=minimal, names=_list_components())
    return config


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a config, with the names of all components that this process knows."""
    return describe_config(_list_components())


def _list_components() -> dict[str, list[str]]:
    return {kind: list(REGISTRIES[kind]) for kind in (*KINDS.values(), *KINDS_OF_FIELDS.values())}


def write_schema(output: str | Path) -> None:
    """Write the schema, whole or not at all; a file that is there is replaced."""
    with replacing(output) as partial:
        partial.write_text(json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
