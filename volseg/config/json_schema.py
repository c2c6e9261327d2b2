"""Generate the JSON schema of a config, with which editors complete and explain keys and mark errors.

The schema follows draft 7, which the YAML servers of editors read. Rules that a schema cannot express (two keys that
exclude each other) are checked when volseg reads the config. The package includes the schema as a file for editors.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from volseg.config.schema import ExperimentConfig

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


def read_schema() -> dict[str, Any]:
    """Return the schema in the package, without an import of torch."""
    content: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return content


def refer_to_schema() -> str:
    """Return the first line of a YAML file that names the schema to editors."""
    return f"# yaml-language-server: $schema={SCHEMA_FILE.as_uri()}"


def list_keys(schema: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys that ``--set`` takes, without sections.

    >>> "training.epochs" in list_keys(read_schema()), "training" in list_keys(read_schema())
    (True, False)
    """
    return list(_list_keys(schema, schema["properties"], ""))


def _list_keys(schema: Mapping[str, Any], properties: Mapping[str, Any], prefix: str) -> list[str]:
    keys = []
    for name, told in properties.items():
        section = _find_section(schema, told)
        below = _list_keys(schema, section["properties"], f"{prefix}{name}.") if section else []
        keys += below or [f"{prefix}{name}"]
    return keys


def _find_section(schema: Mapping[str, Any], told: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section that a property refers to; None for other values and lists of sections."""
    reference = next((part["$ref"] for part in (told, *told.get("allOf", ())) if "$ref" in part), None)
    return None if reference is None else schema["$defs"][reference.rpartition("/")[2]]


def list_names(schema: Mapping[str, Any], kind: str) -> list[str]:
    """Return the component names of one kind in a schema.

    >>> "VNet" in list_names(read_schema(), "network")
    True
    """
    homes = {kind: section for section, kind in KINDS.items()}
    homes |= {kind: f"{kind.capitalize()}Component" for kind in KINDS_OF_FIELDS.values()}
    names: list[str] = schema["$defs"][homes[kind]]["properties"]["name"]["anyOf"][0]["enum"]
    return names
