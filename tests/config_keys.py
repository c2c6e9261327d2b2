"""The keys of a config, for tests."""

from volseg.config.base import ComponentConfig, ConfigModel
from volseg.config.schema import ExperimentConfig


def list_config_keys(section: type[ConfigModel] = ExperimentConfig, prefix: str = "") -> list[str]:
    """Return the dotted keys that ``--set`` takes, without sections."""
    keys = []
    for name, field in section.model_fields.items():
        below = field.annotation
        is_section = isinstance(below, type) and issubclass(below, ConfigModel | ComponentConfig)
        keys += list_config_keys(below, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]
    return keys
