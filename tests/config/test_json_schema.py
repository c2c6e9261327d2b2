"""The editors' schema accepts what volseg accepts, and refuses what it refuses."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_keys import list_config_keys
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from volseg.config.base import validated
from volseg.config.catalogue import list_shipped
from volseg.config.describing import KINDS, KINDS_OF_FIELDS, SCHEMA_FILE, describe_config, refer_to_schema
from volseg.config.loading import load_config
from volseg.config.schema import ExperimentConfig
from volseg.config.yaml_values import parse_yaml
from volseg.errors import ConfigError
from volseg.experiment.configuring import config_schema

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, of the extra dev")

SCHEMA = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
SHIPPED = list_shipped()


def without_names(node: Any) -> Any:
    """Return a schema without the names of components, which depend on the installed MONAI and torch."""
    if isinstance(node, dict):
        return {key: without_names(value) for key, value in node.items() if key != "enum" or len(value) < 4}
    return [without_names(item) for item in node] if isinstance(node, list) else node


def describe(told: dict[str, Any]) -> str | None:
    """Return the description of a property: its own, or that of its section."""
    parts = [told, *told.get("allOf", ())]
    sections = [SCHEMA["$defs"][part["$ref"].rpartition("/")[2]] for part in parts if "$ref" in part]
    return next((part["description"] for part in (*parts, *sections) if "description" in part), None)


def refusals(values: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(values)]


def test_what_is_shipped_is_what_the_config_says() -> None:
    """If this fails: ``volseg schema -o volseg/config/volseg.schema.json``."""
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert without_names(SCHEMA) == without_names(json.loads(json.dumps(config_schema())))


def test_every_key_is_described() -> None:
    """What has no description here has no docstring under its field: editors, ``volseg init`` and the pages lack it."""
    sections = {**SCHEMA["$defs"], "": SCHEMA}
    bare = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, told in section["properties"].items()
        if not describe(told)
    ]
    assert bare == []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_taken_as_written_and_as_resolved(name: str) -> None:
    values = parse_yaml(SHIPPED[name].read_text(encoding="utf-8"), name)
    assert refusals(values) == []
    assert refusals(load_config(SHIPPED[name]).model_dump(mode="json")) == []


def sound() -> dict[str, Any]:
    return yaml.safe_load(SHIPPED["task04_unet"].read_text(encoding="utf-8"))


GOOD: list[dict[str, Any]] = [
    {"parallel": "auto"},
    {"parallel": {"strategy": "spatial", "devices": ["cpu", "cpu"]}},
    {"network": {"name": "MyOwnNetwork", "width": 3}},
    {"losses": [{"name": "my_loss", "gamma": 2, "weight": [1, 2.5]}]},
    {"hooks": [{"name": "my_hook"}]},
    {"evaluation": {"tolerance": {"Anterior": 1.0}}},
    {"training": {"ema": None, "start_from": "runs/other"}},
    {"inference": {"window": None}},
    {"logging": {"loggers": ["tensorboard", {"name": "my_logger", "folder": "x"}]}},
    {"logging": {"loggers": []}},
]


# Values of one key are drawn below.
BAD: list[dict[str, Any]] = [
    {"trainng": {}},
    {"training": {"epoch": 3}},
    {"patch": {"batch": 2}},
    {"patch": {"size": [8, 8, 8], "foreground": 1.2}},
    {"network": {"channels": [8, 16]}},
    {"losses": []},
    {"losses": {"name": "DiceCELoss"}},
    {"losses": [{"name": "DiceCELoss", "weight": [-1.0]}]},
    {"metrics": [{"name": "MyMetric"}]},
    {"parallel": "spatial"},
    {"name": "a name with blanks"},
]


@pytest.mark.parametrize("change", [*GOOD, *BAD], ids=str)
def test_the_schema_takes_and_refuses_what_volseg_does(change: dict[str, Any]) -> None:
    values = {**sound(), **change}
    assert bool(refusals(values)) == (change in BAD)
    with pytest.raises(ConfigError) if change in BAD else nullcontext():
        validated(ExperimentConfig, values, "test")


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.sampled_from([2**31, 2**40, -1.5, 0.25, 1.5, 1e9]),
        st.sampled_from(["", "auto", "none", "all", "T2", "1", "spatial", "a b"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["name", "a"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(key=st.sampled_from(list_config_keys()), value=VALUES)
def test_schema_and_config_say_the_same_of_any_value(key: str, value: Any) -> None:
    values = sound()
    *path, last = key.split(".")
    section = values
    for name in path:
        section = section.setdefault(name, {})
    section[last] = value
    faults: list[str] = []
    try:
        # A text or a truth value may be taken for a number, and is one then.
        values = ExperimentConfig.model_validate(values).model_dump(mode="json")
    except ValidationError as refused:
        faults = [error["type"] for error in refused.errors()]
    if {*faults} - {"value_error", "assertion_error"}:
        assert refusals(values)
    elif not faults:
        assert refusals(values) == []
    # What goes wrong between keys, and what a validator of ours says, no schema can tell.


def test_only_words_of_draft_7_are_used() -> None:
    text = json.dumps(SCHEMA)
    assert "prefixItems" not in text

    def look(node: Any) -> None:
        if isinstance(node, dict):
            assert "$ref" not in node or set(node) == {"$ref"}, node  # the rest would be passed over
            for value in node.values():
                look(value)
        for item in node if isinstance(node, list) else ():
            look(item)

    look(SCHEMA)


def test_names_of_ones_own_are_offered_beside_the_others() -> None:
    kinds = [*KINDS.values(), *KINDS_OF_FIELDS.values()]
    schema = describe_config({kind: [f"my_{kind}"] for kind in kinds})
    homes = {kind: section for section, kind in KINDS.items()}
    for kind in kinds:
        section = schema["$defs"][homes.get(kind, f"{kind.capitalize()}Component")]
        assert section["properties"]["name"]["anyOf"][0] == {"enum": [f"my_{kind}"]}


def test_the_reference_leads_to_the_shipped_file() -> None:
    start = "# yaml-language-server: $schema=file://"
    line = refer_to_schema()
    assert line.startswith(start)
    assert json.loads(Path(line.removeprefix(start)).read_text(encoding="utf-8")) == SCHEMA
