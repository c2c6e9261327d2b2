"""Plain values by the core schema of YAML 1.2."""

import math

import pytest
import yaml

from volseg.config import yaml_values
from volseg.config.yaml_values import DEEPEST, dump_yaml, parse_yaml, read_yaml
from volseg.errors import ConfigError


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def parser(request, monkeypatch):
    """Parse with libyaml, and with the parser of a PyYAML that was built without libyaml."""
    monkeypatch.setattr(yaml_values, "PARSER", getattr(yaml, request.param))


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2E5", -2e5),
        ("1.e+2", 100.0),
        (".5", 0.5),
        ("3", 3),
        ("+3", 3),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0.1", 0.1),
        ("-.INF", -math.inf),
        ("1e", "1e"),
        ("e3", "e3"),
        ("inf", "inf"),
        ("2024-05-01", "2024-05-01"),
        ("True", True),
        ("on", "on"),
        ("no", "no"),
        ("~", None),
        ("null", None),
        ("", None),
        ("'3'", "3"),
        ("'<<'", "<<"),
        ("=", "="),
        ("---\na\n...", "a"),
    ],
)
def test_values_follow_the_core_schema(text, value):
    parsed = parse_yaml(text, "x")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "the key 'c' occurs twice; keep one\n  in line 2, column 11"),
        ("1: a\n0x1: b", "the key '0x1' occurs twice"),
        ("a: 1\nb: [", r"while parsing a flow node.*\n  in line"),
        ("a: &one [1]\nb: *one", r"anchors and aliases \(&one\) are not supported; .*\n  in line 1"),
        ("a: *one", r"anchors and aliases \(&one\)"),
        ("? *one\n: 1", r"anchors and aliases \(&one\)"),
        ("&a [*a]", r"anchors and aliases \(&a\)"),
        ("a:\n  <<: {b: 1}", r"merge keys \(<<\) are not supported; .*\n  in line 2"),
        ("!!int abc", r"tags \(tag:yaml.org,2002:int\) are not supported"),
        ("!!float x", r"tags \(tag:yaml.org,2002:float\)"),
        ("! a", r"tags \(!\)"),
        ("!!python/object/apply:os.getcwd []", r"tags \(.*os.getcwd\)"),
        ("9" * 5000, "a number has 5000 digits; needed: at most 300"),
        ("0x" + "f" * 5000, "a number has 5002 digits"),
        ("[" * 10_000, f"nested too deeply: more than {DEEPEST} levels"),
        ("[" * 10_000 + "]" * 10_000, "nested too deeply"),
        ("- " * 10_000, "nested too deeply"),
        ("a" * 20_000_000, "has 20000000 characters; needed: at most 16777216"),
        ("? [a]\n: 1", "a key is a list or a section; needed: text"),
        ("a\n---\nb", r"a second document begins here; .*\n  in line 2"),
        ("%YAML 1.1\n---\na: on", "it declares a version of YAML other than 1.2"),
        ('"\\ud800"', "character"),
        ('"\\U00110000"', "not valid YAML"),
        ("a: \0", "not valid YAML"),
        ("\ud800", "not valid YAML"),
    ],
)
def test_a_refusal_names_the_source_and_the_line(text, message):
    with pytest.raises(ConfigError, match=rf"(?s)^config\.yaml .*{message}"):
        parse_yaml(text, "config.yaml")


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    "text", ["[" + "1," * 1001 + "]", "- 1\n" * 1001, "{" + "".join(f"{n}: 1," for n in range(501)) + "}"]
)
def test_more_values_than_the_limit_are_refused(text, monkeypatch):
    """The limit is a million, which takes PyYAML's parser a minute: 50 us a value, libyaml 9 us."""
    assert yaml_values.MOST_VALUES == 1_000_000
    monkeypatch.setattr(yaml_values, "MOST_VALUES", 1000)
    with pytest.raises(ConfigError, match=r"(?s)^config\.yaml .*more than 1000 values"):
        parse_yaml(text, "config.yaml")


def test_as_many_values_as_the_limit_are_read(monkeypatch):
    monkeypatch.setattr(yaml_values, "MOST_VALUES", 1000)
    assert parse_yaml("[" + "1," * 999 + "]", "config.yaml") == [1] * 999


@pytest.mark.parametrize(
    "text", ["1e5", "0o10", "0x1F", "010", "1:30", "1_000", "on", "~", "2024-05-01", "<<", "", ".inf", "a: b", "é"]
)
def test_a_text_that_is_written_reads_as_the_same_text(text):
    """PyYAML quotes texts that are numbers in YAML 1.1; YAML 1.2 has other numbers."""
    assert parse_yaml(dump_yaml({text: [text]}), "x") == {text: [text]}


def test_a_shared_value_is_written_in_each_place():
    shared = [1e-5, 1e20, -3, None, True]
    assert parse_yaml(dump_yaml({"a": shared, "b": shared}), "x") == {"a": shared, "b": shared}


@pytest.mark.parametrize("content", ["a: 1".encode("utf-16"), b"\xff\xfe", "Müller: 1".encode("latin-1")])
def test_encodings_other_than_utf_8_are_refused(content, tmp_path):
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.yaml is (not text in UTF-8|text in UTF-16)"):
        read_yaml(tmp_path / "a.yaml", "a.yaml")


def test_an_endless_file_is_refused():
    with pytest.raises(OSError, match="more than 67108864 bytes"):
        read_yaml("/dev/zero", "zero")
