"""Describe a config: by a JSON schema for editors, and by comments beside its values in YAML.

With the schema editors complete and explain keys and mark errors. It follows draft 7, which the YAML servers of editors
read. Rules that a schema cannot express (two keys that exclude each other) are checked when volseg reads the config.
The package includes the schema as a file for editors.

The comments are the schema's descriptions, so they cannot contradict it. The commented file loads as the same config.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from volseg.config.base import ComponentConfig, ConfigModel
from volseg.config.loading import format_inline, load_config
from volseg.config.schema import ExperimentConfig
from volseg.files import replacing

SCHEMA_FILE = Path(__file__).with_name("volseg.schema.json")
"""Schema in the package; ``volseg schema -o volseg/config/volseg.schema.json`` writes it."""

DRAFT = "http://json-schema.org/draft-07/schema#"

KINDS = {
    "NetworkConfig": "network",
    "LossConfig": "loss",
    "MetricConfig": "metric",
    "OptimizerConfig": "optimizer",
    "ScheduleConfig": "schedule",
}
"""Section to its kind of component."""

KINDS_OF_FIELDS = {
    ("", "preprocessing"): "transform",
    ("", "hooks"): "hook",
    ("AugmentationConfig", "own"): "augmentation",
    ("LoggingConfig", "loggers"): "logger",
}
"""Section and field to the kind, for lists of plain components."""

BY_NAME_ALONE = {"logger"}
"""Kinds whose lists may contain names in place of components."""


def describe_config(names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the schema of a config.

    Parameters
    ----------
    names
        Kind of component to the names that editors offer; any other name is valid too, for custom components.
    """
    schema = ExperimentConfig.model_json_schema()
    sections = schema.pop("$defs")
    for section, kind in KINDS.items():
        _offer(sections[section], names[kind])
    for (section, field), kind in KINDS_OF_FIELDS.items():
        own = f"{kind.capitalize()}Component"
        sections[own] = deepcopy(sections["ComponentConfig"])
        _offer(sections[own], names[kind])
        place = sections[section] if section else schema
        item = {"$ref": f"#/$defs/{own}"}
        alone = sections[own]["properties"]["name"]["anyOf"]
        place["properties"][field]["items"] = {"anyOf": [item, *alone]} if kind in BY_NAME_ALONE else item
    del sections["ComponentConfig"]
    title = {"$schema": DRAFT, "title": "volseg config"}
    whole: dict[str, Any] = _as_draft_7({**schema, **title, "$defs": sections})
    return whole


def _offer(section: dict[str, Any], names: Sequence[str]) -> None:
    own = section["properties"]["name"]
    about = {key: own[key] for key in ("description", "default") if key in own}
    section["properties"]["name"] = {**about, "anyOf": [{"enum": sorted(names)}, {"type": "string"}]}


def _as_draft_7(node: Any) -> Any:
    """Return a schema of draft 2020-12 as draft 7."""
    if isinstance(node, list):
        return [_as_draft_7(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {
        key: value for key, value in node.items() if key != "title" or not isinstance(value, str) or "$defs" in node
    }
    if "prefixItems" in node:
        node["items"], node["additionalItems"] = node.pop("prefixItems"), False
    if "$ref" in node and len(node) > 1:  # draft 7 ignores other keys beside $ref
        node = {**{key: value for key, value in node.items() if key != "$ref"}, "allOf": [{"$ref": node["$ref"]}]}
    if "description" in node and isinstance(node["description"], str):
        node["description"] = " ".join(node["description"].split())
    return {key: _as_draft_7(value) for key, value in node.items()}


def refer_to_schema() -> str:
    """Return the first line of a YAML file that names the schema to editors."""
    return f"# yaml-language-server: $schema={SCHEMA_FILE.as_uri()}"


WIDTH = 110

BOUNDS = {
    "minimum": "at least {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "at most {:g}",
    "exclusiveMaximum": "below {:g}",
}
TYPES = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}


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
    schema = type(section).model_json_schema()["properties"]
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        is_default = not field.is_required() and value == field.get_default(call_default_factory=True)
        if minimal and is_default:
            continue
        is_section = isinstance(value, ConfigModel)
        if not indent:
            yield ""
        yield from _comment(_describe_field(field, schema[name], with_default=not (is_default or is_section)), indent)
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
    schema = model.model_json_schema()["properties"]
    for key, own in model.model_fields.items():
        if key != "name":
            yield f"{key}: {_describe_field(own, schema[key], with_default=True)}"


def _find_components(annotation: Any) -> Iterator[type[ComponentConfig]]:
    if isinstance(annotation, type) and issubclass(annotation, ComponentConfig):
        yield annotation
    for argument in get_args(annotation):
        yield from _find_components(argument)


def _comment(text: str, indent: str) -> Iterator[str]:
    start = f"{indent}# "
    yield from textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def _describe_field(field: FieldInfo, schema: Mapping[str, Any], *, with_default: bool) -> str:
    """Return the meaning of a field, its possible values, and the default."""
    meaning = re.sub(r"``([^`]*)``", r"\1", " ".join((field.description or "").split()))
    parts = [meaning, describe_values(schema)]
    if with_default and not field.is_required():
        parts.append(f"Default {format_inline(field.get_default(call_default_factory=True))}.")
    return " ".join(part for part in parts if part)


def describe_values(schema: Mapping[str, Any]) -> str:
    """Return the values that a field accepts, as far as its JSON schema states them.

    >>> from volseg.config.sections import DataConfig
    >>> describe_values(DataConfig.model_json_schema()["properties"]["device_limit"])
    'A number above 0; or null.'
    """
    text = "; or ".join(dict.fromkeys(filter(None, map(_describe_type, schema.get("anyOf", [schema])))))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _describe_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of: {', '.join(map(str, schema['enum']))}"
    if "const" in schema:
        return str(schema["const"])
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} values, {_describe_type(schema['prefixItems'][0])} each"
    if schema.get("format") == "path":
        return "a path"
    bounds = [wording.format(schema[key]) for key, wording in BOUNDS.items() if abs(schema.get(key, 2**31)) < 2**31]
    return f"{TYPES[schema['type']]} {' and '.join(bounds)}".strip() if schema.get("type") in TYPES else ""
