"""What every section of a config has in common.

A section is frozen and takes keywords only; a key that it does not know is refused with the nearest one that it does.
Cross-field checks belong to the section that owns the fields (``model_validator``), never to the code that uses them.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from volseg.config.nearest import did_you_mean
from volseg.config.wording import say_what_is_needed, suggest_plain
from volseg.errors import ConfigError

__all__ = [
    "ComponentConfig",
    "ConfigModel",
    "list_values",
    "require_sound_parts",
    "validated",
]

Section = TypeVar("Section", bound="ConfigModel")


RENAMED = {"training.capture": "training.record"}
"""Keys that the schema had before, to what stands for them."""


class _Fields(BaseModel):
    """Fields that take no value of another type."""

    @field_validator("*", mode="before")
    @classmethod
    def _keep_types_apart(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic converts: true to the number 1, the texts on and off to a bool."""
        kinds = set(_list_kinds(cls.model_fields[str(info.field_name)].annotation))
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, bool) and kinds & {int, float} and not kinds & {bool, item}:
                raise PydanticCustomError("float_type" if float in kinds else "int_type", "needed: a number")
            if isinstance(item, str) and bool in kinds and not kinds & {str, item}:
                raise PydanticCustomError("bool_type", "needed: true or false")
        return value


def _list_kinds(annotation: Any) -> Iterator[Any]:
    """Yield the plain types in an annotation, and the values of its literals."""
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

    words: ClassVar[Sequence[str]] = ()
    """What a validator of the section takes in place of its keys, such as ``parallel: auto``."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe what validators take besides the fields: a word in place of the section."""
        schema = handler.resolve_ref_schema(handler(core))
        if cls.words:  # a pattern is heeded for text only, and properties for mappings
            schema |= {"type": ["object", "string"], "pattern": f"^({'|'.join(cls.words)})$"}
        return schema


class ComponentConfig(_Fields):
    """A component: its name in the registry of its kind, and parameters of its own."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True, allow_inf_nan=False)

    name: str
    """Of the component in the registry of its kind (`volseg components`); its own parameters stand beside it."""

    @model_validator(mode="after")
    def _numbers_are_finite(self) -> Self:
        """Refuse what no component can mean; parameters have no fields that could say so."""
        for name, value in (self.model_extra or {}).items():
            if (absurd := _find_absurd_number(value)) is not None:
                raise ValueError(f"{name} must be a finite number of 64 bits at most, got {absurd!r}")
            for item in list_values(value):
                if (plain := suggest_plain(item)) is not None:
                    raise ValueError(f"{name} is a text; {plain}, got {item!r}")
        return self

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as a registry takes them."""
        return {"name": self.name, **(self.model_extra or {})}


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
        lines = [_sentence(section, error) for error in fault.errors(include_url=False) if not _follows(error)]
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(f"  {line}" for line in lines)) from None


def require_sound_parts(section: type[Section], values: Mapping[str, Any], source: str) -> None:
    """Raise as `validated` does for what is wrong in ``values`` whatever else the section will hold.

    What is missing may come, lists of which items are set may come, and what a section says of several keys at a time
    may hold by then: these are left to `validated`.
    """
    try:
        section.model_validate(values)
    except ValidationError as fault:
        errors = [error for error in fault.errors(include_url=False) if not _may_mend(error)]
        if errors:
            raise ConfigError(
                "\n".join([f"{source} cannot be used:", *(f"  {_sentence(section, error)}" for error in errors)])
            ) from None


def _may_mend(error: Any) -> bool:
    came = error["input"]
    is_part_of_list = isinstance(came, Mapping) and bool(came) and all(str(key).isdigit() for key in came)
    return error["type"] in ("missing", "value_error") or is_part_of_list


def _find_absurd_number(value: Any) -> float | int | None:
    """Return the first number in ``value``, lists and mappings searched, that is not finite or exceeds 64 bits.

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
    *parents, last = [part for part in error["loc"] if not _is_of_union(part)] or ("(top level)",)
    where = ".".join(str(part) for part in (*parents, last))
    if error["type"] == "extra_forbidden":
        if where in RENAMED:
            return f"{where}: unknown key; write {RENAMED[where]}"
        return f"{where}: unknown key; {did_you_mean(str(last), _section_at(section, parents).model_fields)}"
    fields = _section_at(section, (*parents, last)).model_fields
    message = say_what_is_needed(error, str(parents[-1] if parents and isinstance(last, int) else last), fields)
    came = error["input"]
    if error["type"] == "missing" and isinstance(last, int):
        key = ".".join(str(part) for part in parents)
        return f"{key}: needed: at least {last + 1} values, got {came!r}"
    if error["type"] == "missing" and isinstance(came, Mapping):
        extra = [str(key) for key in came if key not in _section_at(section, parents).model_fields]
        if near := get_close_matches(str(last), extra, n=1):  # a section that takes parameters takes a slip for one
            return f"{where}: {message}; {near[0]!r} is there, did you mean {last!r}?"
    if error["type"] in ("value_error", "missing") or isinstance(came, Mapping):
        return f"{where}: {message}"
    return f"{where}: {message}, got {came!r}"


def _follows(error: Any) -> bool:
    """Tell whether a list is too short only because its items were refused, which is told of each."""
    return error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]


def _is_of_union(part: Any) -> bool:
    """Tell whether a part of a place is no key, but which of several types pydantic tried there."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-"))


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
