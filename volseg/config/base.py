"""Define the base classes of config sections, and the messages of their errors.

A section is frozen and takes keywords only. The error for an unknown key names the nearest known key.
Cross-field checks belong to the section that owns the fields (``model_validator``), never to the code that uses them.
"""

import math
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError

SECTIONS = ("model_type", "model_attributes_type")
LISTS = ("tuple_type", "list_type")
NEEDED = {
    **dict.fromkeys(SECTIONS, "needed: a section of `key: value` lines"),
    **dict.fromkeys(LISTS, "needed: a list in brackets, such as [40, 40, 40] or [{name: NAME}]"),
    "path_type": "needed: a path, in quotes if it is a number",
    "string_type": "needed: text, in quotes if it looks like a number",
    "string_pattern_mismatch": "needed: letters, digits, '.', '_' and '-', starting with a letter or a digit",
}
"""Message for each pydantic error type whose own message uses Python's terms."""

MISTAKEN = re.compile(
    r"yes|no|on|off"  # truth values of YAML 1.1
    r"|[-+]?\d+(_\d+)+"
    r"|[-+]?\d+,\d+"
    r"|(?=.*e)[-+]?\d+(e[-+]?\d+)?(,\d+(e[-+]?\d+)?)+",
    re.IGNORECASE,
)
"""Strings that were probably meant as numbers or truth values."""


Count = Annotated[int, Field(ge=1, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Sides = tuple[Count, Count, Count]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed that the generators of Python, NumPy and torch accept."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
ClassWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


Section = TypeVar("Section", bound="ConfigModel")


class _Fields(BaseModel):
    """Fields that refuse values of another type."""

    @field_validator("*", mode="before")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """Expand a leading ``~``, which no shell expands in a file or after ``--set output=``."""
        return os.path.expanduser(value) if isinstance(value, str | os.PathLike) else value

    @field_validator("*", mode="before")
    @classmethod
    def _keep_types_apart(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values that pydantic would convert: true to the number 1, the strings on and off to a bool."""
        kinds = set(_list_kinds(cls.model_fields[str(info.field_name)].annotation))
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, bool) and kinds & {int, float} and not kinds & {bool, item}:
                raise PydanticCustomError("float_type" if float in kinds else "int_type", "needed: a number")
            if isinstance(item, str) and bool in kinds and not kinds & {str, item}:
                raise PydanticCustomError("bool_type", "needed: true or false")
        return value


def _list_kinds(annotation: Any) -> Iterator[Any]:
    """Yield the plain types of an annotation, and the values of its literals."""
    if arguments := get_args(annotation):
        for argument in arguments:
            yield from _list_kinds(argument)
    elif isinstance(annotation, Hashable):
        yield annotation


class ConfigModel(_Fields):
    """A section of a config."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ComponentConfig(_Fields):
    """A component: its name in the registry of its kind, and its own parameters."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True, allow_inf_nan=False)

    name: str
    """Name of the component (`volseg components`); its own parameters are further keys of this section."""

    @model_validator(mode="after")
    def _numbers_are_finite(self) -> Self:
        """Refuse absurd numbers and probable typing errors: no typed fields check a component's own parameters."""
        for name, value in (self.model_extra or {}).items():
            if (absurd := _find_absurd_number(value)) is not None:
                raise ValueError(f"{name} must be a finite number of 64 bits at most, got {absurd!r}")
            for item in list_values(value):
                if isinstance(item, str) and MISTAKEN.fullmatch(item):
                    raise ValueError(f"{name} is the text {item!r}; write numbers as 0.003 or 1000, or true or false")
        return self

    def spec(self) -> dict[str, Any]:
        """Return name and parameters for a registry."""
        return {"name": self.name, **(self.model_extra or {})}


def validated(section: type[Section], values: Mapping[str, Any], source: str) -> Section:
    """Build ``section`` from ``values``, or raise an error with one sentence per fault.

    Raises
    ------
    ConfigError
        If a value breaks a rule; names ``source``, the path of the key, the rule and the value.
    """
    try:
        return section.model_validate(values)
    except ValidationError as fault:
        told = [_sentence(section, error) for error in fault.errors(include_url=False) if not _follows(error)]
        raise ConfigError("\n  ".join([f"{source} cannot be used:", *told])) from None


def require_sound_parts(section: type[Section], values: Mapping[str, Any], source: str) -> None:
    """Raise as `validated` does for faults in ``values`` that no further values can correct.

    Missing keys, items of lists that are not yet set, and rules that involve several keys are left to `validated`.
    """
    try:
        section.model_validate(values)
    except ValidationError as fault:
        told = [_sentence(section, error) for error in fault.errors(include_url=False) if not _may_come_right(error)]
        if told:
            raise ConfigError("\n  ".join([f"{source} cannot be used:", *told])) from None


def _may_come_right(error: Any) -> bool:
    """Return whether further values of the section may correct a fault."""
    came = error["input"]
    is_part_of_list = isinstance(came, Mapping) and bool(came) and all(str(key).isdigit() for key in came)
    return error["type"] in ("missing", "value_error") or is_part_of_list


def _find_absurd_number(value: Any) -> float | int | None:
    """Return the first number in ``value``, nested ones included, that is not finite or exceeds 64 bits.

    >>> _find_absurd_number({"lr": 0.1, "betas": [0.9, float("nan")]})
    nan
    """
    for item in list_values(value):
        if (isinstance(item, float) and not math.isfinite(item)) or (isinstance(item, int) and item.bit_length() > 63):
            return item
    return None


def list_values(value: Any) -> Iterator[Any]:
    """Yield the plain values in lists and mappings."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from list_values(item)
    else:
        yield value


def _sentence(section: type[BaseModel], error: Any) -> str:
    # A part like ``list[int]`` or ``constrained-str`` is not a key, but one of several types that pydantic tried.
    keys = [part for part in error["loc"] if "[" not in str(part) and not str(part).startswith("constrained-")]
    *parents, last = keys or ("(top level)",)
    where = ".".join(str(part) for part in (*parents, last))
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key; {did_you_mean(str(last), _section_at(section, parents).model_fields)}"
    message = NEEDED.get(error["type"], error["msg"].removeprefix("Value error, ").replace("Tuple", "A list"))
    if error["type"] in SECTIONS:
        message += f" (known keys: {', '.join(sorted(_section_at(section, (*parents, last)).model_fields))})"
    came = error["input"]
    if error["type"] == "missing" and isinstance(last, int):
        key = ".".join(str(part) for part in parents)
        return f"{key}: needed: at least {last + 1} values, got {came!r}"
    if error["type"] == "missing" and isinstance(came, Mapping):
        extra = [str(key) for key in came if key not in _section_at(section, parents).model_fields]
        if near := get_close_matches(str(last), extra, n=1):  # a component accepts a misspelt key as its own parameter
            return f"{where}: {message}; found {near[0]!r}, did you mean {last!r}?"
    if error["type"] in ("value_error", "missing") or isinstance(came, Mapping):
        return f"{where}: {message}"
    return f"{where}: {message}, got {came!r}"


def _follows(error: Any) -> bool:
    """Return whether a list is too short only because items were refused; each refused item has its own error."""
    return error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]


def _section_at(section: type[BaseModel], path: Sequence[Any]) -> type[BaseModel]:
    """Return the section at ``path``; parts that are not fields (an index) are skipped."""
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
