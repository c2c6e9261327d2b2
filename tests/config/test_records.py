"""Dataclasses that are read back from JSON, exactly."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pytest

from volseg.config.records import read_record


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
