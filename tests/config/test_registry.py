import pytest

from volseg.config.registry import Registry
from volseg.errors import ConfigError


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
    with pytest.raises(ConfigError, match="a shape called 'Cube' exists already"):
        shapes.register("Cube", dict)


def test_a_component_that_was_registered_says_where_it_came_from_and_can_be_taken_back(shapes):
    shapes.register("Cube", dict)
    assert str(shapes.get_source("Cube")) == "a call of volseg.register in builtins"
    assert shapes.get_source("Ball") is None
    assert shapes.registered == {"Cube"}
    shapes.forget("Cube")
    assert "Cube" not in shapes
    with pytest.raises(ConfigError, match="is registered as a name and a class or function"):
        shapes.register("Cube", 3)


def test_a_package_that_a_component_needs_is_named_with_what_to_type(shapes):
    def needs(radius):
        raise ImportError("import einops (No module named 'einops').")  # as MONAI's optional imports word it

    shapes.register("Needs", needs)
    with pytest.raises(ConfigError, match=r"shape Needs needs a package.*pip install einops$"):
        shapes.build({"name": "Needs", "radius": 1})
