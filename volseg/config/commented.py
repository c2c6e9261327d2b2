"""Write a config as commented YAML: each value with its meaning, bounds and alternatives.

The comments are the schema's descriptions, so they cannot contradict it. The file loads as the same config.
"""

import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from volseg.config.base import ComponentConfig, ConfigModel
from volseg.config.json_schema import KINDS, KINDS_OF_FIELDS
from volseg.config.loading import load_config
from volseg.config.schema import ExperimentConfig
from volseg.files import replacing

WIDTH = 110

BOUNDS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "min_length": "at least {} of them",
}


def write_commented(
    config: ExperimentConfig,
    path: str | Path,
    *,
    head: Sequence[str] = (),
    minimal: bool = False,
    names: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write a config with comments, atomically.

    Parameters
    ----------
    config
        Config to write.
    path
        File to write; an existing file is replaced.
    head
        First lines of the file: comments.
    minimal
        Whether to leave out values that equal the default.
    names
        Kind of component to its known names. Comments list no names for other kinds.
    """
    with replacing(path) as partial:
        lines = [*head, *_describe_section(config, "", minimal=minimal, names=names or {})]
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert load_config(partial) == config, "the text says something else than the config"


def _describe_section(
    section: BaseModel, indent: str, *, minimal: bool, names: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the lines of a section, each value below its comments."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        is_default = not field.is_required() and value == field.get_default(call_default_factory=True)
        if minimal and is_default:
            continue
        is_section = isinstance(value, ConfigModel)
        if not indent:
            yield ""
        yield from _comment(_say(field, default=None if is_default or is_section else field), indent)
        for line in _describe_component(type(section).__name__, name, field, names):
            yield from _comment(line, indent)
        if is_section:
            yield f"{indent}{name}:"
            yield from _describe_section(value, f"{indent}  ", minimal=minimal, names=names)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield f"{indent}{name}:"
            yield from (f"{indent}  - {format_inline(item)}" for item in value)
        else:
            yield f"{indent}{name}: {format_inline(value)}"


def _describe_component(section: str, name: str, field: FieldInfo, names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the names that a field of components accepts, and the keys that all these components have."""
    model = next(_find_components(field.annotation), None)
    if model is None:
        return
    kind = KINDS.get(model.__name__) or KINDS_OF_FIELDS.get(("" if section == "ExperimentConfig" else section, name))
    if kind is not None and kind in names:
        yield f"Names: {', '.join(names[kind])}."
    for key, own in model.model_fields.items():
        if key != "name":
            yield f"{key}: {_say(own, default=own)}"


def _find_components(annotation: Any) -> Iterator[type[ComponentConfig]]:
    if isinstance(annotation, type) and issubclass(annotation, ComponentConfig):
        yield annotation
    for argument in get_args(annotation):
        yield from _find_components(argument)


def _comment(text: str, indent: str) -> Iterator[str]:
    start = f"{indent}# "
    yield from textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def _say(field: FieldInfo, default: FieldInfo | None) -> str:
    """Return the meaning of a field, its possible values, and the default, if one is given."""
    meaning = re.sub(r"``([^`]*)``", r"\1", " ".join((field.description or "").split()))
    said = [meaning, describe_values(field)]
    if default is not None and not field.is_required():
        said.append(f"Default {format_inline(field.get_default(call_default_factory=True))}.")
    return " ".join(part for part in said if part)


def describe_values(field: FieldInfo) -> str:
    """Return the values that a field accepts, as far as its type states them.

    >>> from volseg.config.schema import DataConfig, TrainingConfig
    >>> describe_values(TrainingConfig.model_fields["precision"])
    'One of: auto, fp32, bf16, fp16.'
    >>> describe_values(DataConfig.model_fields["device_limit"])
    'A number above 0; or null.'
    """
    told = list(dict.fromkeys(_describe_type(field.annotation, field.metadata)))
    return f"{told[0][0].upper()}{'; or '.join(told)[1:]}." if told else ""


def _describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[str]:
    """Yield a description of each kind of value that a type accepts."""
    if hasattr(annotation, "__metadata__"):
        yield from _describe_type(annotation.__origin__, (*annotation.__metadata__, *metadata))
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _describe_type(argument, metadata)
    elif origin is Literal:
        one = "one of: " if len(arguments) > 1 else ""
        yield one + ", ".join(map(str, arguments))
    elif annotation is type(None):
        yield "null"
    elif annotation is bool:
        yield "true or false"
    elif annotation in (int, float):
        bounds = _describe_bounds(metadata)
        yield f"{'a whole number' if annotation is int else 'a number'}{bounds and f' {bounds}'}"
    elif origin is tuple and arguments and arguments[-1] is not Ellipsis:
        yield f"{len(arguments)} values, {next(_describe_type(arguments[0]), 'each')} each"
    elif annotation is Path:
        yield "a path"


def _describe_bounds(metadata: Sequence[Any]) -> str:
    """Return the bounds of a number, except bounds of 32 bits."""
    found = [
        wording.format(f"{bound:g}")
        for constraint in _flatten(metadata)
        for name, wording in BOUNDS.items()
        if isinstance(bound := getattr(constraint, name, None), int | float) and abs(bound) < 2**31
    ]
    return " and ".join(found)


def _flatten(metadata: Sequence[Any]) -> Iterator[Any]:
    for constraint in metadata:
        yield from constraint.metadata if isinstance(constraint, FieldInfo) else (constraint,)


def format_inline(value: Any) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, ComponentConfig):
        value = value.model_dump(mode="json", exclude_defaults=True) | {"name": value.name}
        value = {"name": value.pop("name"), **value}
    elif isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{format_inline(key)}: {format_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_inline, value)) + "]"
    if isinstance(value, str | Path):
        plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./]*", str(value)) and str(value).lower() not in WORDS
        return str(value) if plain else json.dumps(str(value), ensure_ascii=False)  # a JSON string is a YAML string
    return json.dumps(value)


WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that YAML reads as null or truth values."""
