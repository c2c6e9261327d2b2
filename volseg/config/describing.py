"""Describe a config by a JSON schema for editors, and by comments above its values in YAML.

With the schema, editors complete keys, explain them and mark errors. It follows draft 7, which editors' YAML servers
read. Rules that a schema cannot express (two keys that exclude each other) are checked when volseg reads the config.
The package includes the schema as a file for editors.

The comments are the schema's descriptions, so they cannot contradict it. The commented file loads as the same config.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from volseg.config.base import ConfigModel
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
"""Kind of component by section."""

KINDS_OF_FIELDS = {
    ("", "preprocessing"): "transform",
    ("", "hooks"): "hook",
    ("AugmentationConfig", "own"): "augmentation",
    ("LoggingConfig", "loggers"): "logger",
}
"""Kind of component by section and field, for lists of plain components."""

BY_NAME_ALONE = {"logger"}
"""Kinds whose lists may contain names in place of components."""


def describe_config(names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the schema of a config.

    Parameters
    ----------
    names
        Names that editors offer, by kind of component; other names are also valid, for custom components.
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
    if "$ref" in node and len(node) > 1:  # draft 7 ignores other keys next to $ref
        node = {**{key: value for key, value in node.items() if key != "$ref"}, "allOf": [{"$ref": node["$ref"]}]}
    if "description" in node and isinstance(node["description"], str):
        node["description"] = " ".join(node["description"].split())
    return {key: _as_draft_7(value) for key, value in node.items()}


def refer_to_schema() -> str:
    """Return the first line of a YAML file that names the schema to editors."""
    return f"# yaml-language-server: $schema={SCHEMA_FILE.as_uri()}"


WIDTH = 110


def write_commented(
    config: ExperimentConfig, path: str | Path, *, head: Sequence[str] = (), minimal: bool = False
) -> None:
    """Write a config with the meaning of each value above it, atomically.

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
    """
    with replacing(path) as partial:
        lines = [*head, *_describe_section(config, "", minimal=minimal)]
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert load_config(partial) == config, "the written text differs from the config"


def _describe_section(section: BaseModel, indent: str, *, minimal: bool) -> Iterator[str]:
    """Yield the lines of a section: each value below its meaning and, if it differs, its default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        is_default = not field.is_required() and value == field.get_default(call_default_factory=True)
        if minimal and is_default:
            continue
        is_section = isinstance(value, ConfigModel)
        if not indent:
            yield ""
        meaning = re.sub(r"``([^`]*)``", r"\1", " ".join((field.description or "").split()))
        if not (is_default or is_section or field.is_required()):
            meaning += f" Default {format_inline(field.get_default(call_default_factory=True))}."
        yield from comment(meaning, indent)
        if is_section:
            yield f"{indent}{name}:"
            yield from _describe_section(value, f"{indent}  ", minimal=minimal)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield f"{indent}{name}:"
            yield from (f"{indent}  - {format_inline(item)}" for item in value)
        else:
            yield f"{indent}{name}: {format_inline(value)}"


def comment(text: str, indent: str = "") -> Iterator[str]:
    """Yield a text as comment lines."""
    start = f"{indent}# "
    yield from textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
