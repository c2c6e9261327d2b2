"""Components are found by name, and dataclasses survive a round trip through JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pytest

from volseg.config.registry import Registry, read_record
from volseg.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    sides: tuple[float, float]
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    number: int
    inner: Inner
    times: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("number must not be negative")


SOUND = Outer(3, Inner((1.0, 2.5), "a"), {"b": 1.0})


def test_what_was_written_is_read():
    assert read_record(Outer, json.loads(json.dumps(asdict(SOUND)))) == SOUND
    assert read_record(Outer, {"number": 3, "inner": {"sides": [1, 2]}, "times": {}}) == Outer(3, Inner((1.0, 2.0)), {})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"number": "3"}, r"^number: .* valid integer, got '3'$"),
        ({"number": True}, r"^number: .* valid integer, got True$"),
        ({"number": -1}, r"^Outer: .*number must not be negative"),
        ({"inner": {"sides": [1, 2, 3]}}, r"^inner\.sides"),
        ({"inner": {"sides": [1, 2], "other": 1}}, r"^inner\.other: Unexpected .*, got 1$"),
        ({"inner": None}, "^inner: "),
        ({"times": {"b": None}}, r"^times\.b: "),
        ({"other": 1}, "^other: Unexpected"),
        ({"other": 1, "number": None}, "^number: .*; other: "),
    ],
)
def test_anything_else_is_told_in_one_line(change, told):
    with pytest.raises(ValueError, match=told) as fault:
        read_record(Outer, {**asdict(SOUND), **change})
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("content", [None, 3, [], {}, "abc", [asdict(SOUND)]])
def test_what_is_no_record_is_refused(content):
    with pytest.raises(ValueError, match=r"Outer: |Field required"):
        read_record(Outer, content)


def ball(radius, *, colour="red"):
    if radius < 0:
        raise ValueError("radius must not be negative")
    return (radius, colour)


def anything(**parameters):
    return parameters


@pytest.fixture
def shapes():
    return Registry("shape", {"Ball": ball, "Anything": anything})


def test_builds_by_name_with_what_the_program_adds(shapes):
    assert shapes.build({"name": "Ball", "radius": 2}, colour="blue") == (2, "blue")
    assert shapes.build({"name": "Anything", "x": 1}) == {"x": 1}
    assert shapes.bind({"name": "Ball", "colour": "green"})(1) == (1, "green")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "Bal"}, "no shape is called 'Bal'; did you mean 'Ball'?"),
        ({"name": "os.system"}, "no shape is called 'os.system'; known: Anything, Ball"),
        ({"name": "Ball", "radus": 1}, "shape Ball has no parameter 'radus'; did you mean 'radius'?"),
        ({"radius": 1}, "a shape needs a name"),
        ({"name": "Ball", "radius": -1}, "shape Ball refused {'radius': -1}: radius must not be negative"),
    ],
)
def test_refuses_with_the_nearest_names(shapes, spec, message):
    with pytest.raises(ConfigError) as raised:
        shapes.build(spec)
    assert message in str(raised.value)


def test_what_follows_from_the_data_cannot_be_set(shapes):
    with pytest.raises(ConfigError, match=r"\['colour'\] follow from the data and cannot be set"):
        shapes.build({"name": "Ball", "radius": 1, "colour": "red"}, colour="blue")


def test_a_name_is_given_once(shapes):
    shapes.register("Cube", dict)
    with pytest.raises(ConfigError, match="a shape called 'Cube' already exists"):
        shapes.register("Cube", dict)


def test_a_component_that_was_registered_says_where_it_came_from_and_can_be_taken_back(shapes):
    shapes.register("Cube", dict)
    assert str(shapes.get_source("Cube")) == "a call of volseg.register in builtins"
    assert shapes.get_source("Ball") is None
    assert shapes.registered == {"Cube"}
    shapes.forget("Cube")
    assert "Cube" not in shapes
    with pytest.raises(ConfigError, match="needs a name and a class or function"):
        shapes.register("Cube", 3)


def test_a_package_that_a_component_needs_is_named_with_what_to_type(shapes):
    def needs(radius):
        raise ImportError("import einops (No module named 'einops').")  # as MONAI's optional imports word it

    shapes.register("Needs", needs)
    with pytest.raises(ConfigError, match=r"shape Needs needs a package.*pip install einops$"):
        shapes.build({"name": "Needs", "radius": 1})
