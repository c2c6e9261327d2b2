"""What every section of a config has in common.

A section is frozen and takes keywords only; a key that it does not know is refused with the nearest one that it does.
Cross-field checks belong to the section that owns the fields (``model_validator``), never to the code that uses them.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError

__all__ = ["ConfigModel", "validated"]

Section = TypeVar("Section", bound="ConfigModel")


class ConfigModel(BaseModel):
    """A section of a config."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), cls.model_fields)}")
        return values


def validated(section: type[Section], values: Mapping[str, Any], source: str) -> Section:
    """Build ``section`` from ``values``, or raise one readable sentence per fault.

    Raises
    ------
    ConfigError
        Names ``source``, the key's path, the rule and the value that came.
    """
    try:
        return section.model_validate(values)
    except ValidationError as fault:
        lines = [_sentence(error) for error in fault.errors(include_url=False)]
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(f"  {line}" for line in lines)) from None


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "(top level)"
    message = error["msg"].removeprefix("Value error, ")
    came = error["input"]
    if error["type"] == "value_error" or isinstance(came, Mapping):
        return f"{where}: {message}"
    return f"{where}: {message}, got {came!r}"
