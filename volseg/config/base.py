"""What every section of a config has in common.

A section is frozen and takes keywords only; a key that it does not know is refused with the nearest one that it does.
Cross-field checks belong to the section that owns the fields (``model_validator``), never to the code that uses them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError

__all__ = ["ConfigModel", "validated"]

Section = TypeVar("Section", bound="ConfigModel")


class ConfigModel(BaseModel):
    """A section of a config."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


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
        lines = [_sentence(section, error) for error in fault.errors(include_url=False)]
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(f"  {line}" for line in lines)) from None


def _sentence(section: type[BaseModel], error: Any) -> str:
    *parents, last = error["loc"] or ("(top level)",)
    where = ".".join(str(part) for part in (*parents, last))
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key; {did_you_mean(str(last), _section_at(section, parents).model_fields)}"
    message = error["msg"].removeprefix("Value error, ")
    came = error["input"]
    if error["type"] in ("value_error", "missing") or isinstance(came, Mapping):
        return f"{where}: {message}"
    return f"{where}: {message}, got {came!r}"


def _section_at(section: type[BaseModel], path: Sequence[Any]) -> type[BaseModel]:
    """Return the section that lies at ``path``; parts that are no field (an index) are passed over."""
    for part in path:
        if part in section.model_fields:
            section = next(_sections(section.model_fields[part].annotation), section)
    return section


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections named in an annotation such as ``tuple[Section, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
