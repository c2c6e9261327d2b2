"""YAML as people mean it."""

import pytest

from volseg.config.yaml_values import parse_yaml
from volseg.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2E5", -2e5),
        ("1.e+2", 100.0),
        ("3", 3),
        ("0.1", 0.1),
        ("1e", "1e"),
        ("e3", "e3"),
        ("null", None),
    ],
)
def test_a_number_is_a_number(text, value):
    parsed = parse_yaml(text, "x")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}", r"(?s)config\.yaml is not valid YAML: the key 'c' stands twice; keep one.*line 2"),
        ("a: [", r"(?s)config\.yaml is not valid YAML.*line 1"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("[" * 5000, "nested too deeply to be a config"),
    ],
)
def test_what_cannot_be_read_says_where(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "config.yaml")


def test_who_reads_a_text_again_gets_values_of_its_own():
    """The text is loaded once; what one reader changes in its values, another must not find."""
    text = "a: {b: [1, 2]}\nshared: &one [3]\nagain: *one"
    first = parse_yaml(text, "x")
    first["a"]["b"].append(3)
    del first["shared"]
    second = parse_yaml(text, "y")
    assert second == {"a": {"b": [1, 2]}, "shared": [3], "again": [3]}
    assert second["shared"] is second["again"]
