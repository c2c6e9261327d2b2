"""What a search may try: ranges and choices, and what is refused of them."""

import pytest

from volseg.config.search_space import read_space
from volseg.errors import ConfigError


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a text as the file of a search."""

    def read_text(text):
        (tmp_path / "search.yaml").write_text(text, encoding="utf-8")
        return read_space(tmp_path / "search.yaml")

    return read_text


def test_choices_are_what_set_takes_and_sections_come_first(read):
    space = read("optimizer.lr: {low: 1, high: 2.5, step: 0.5}\noptimizer: [{name: SGD, lr: 1}, {name: Adam}]\n")
    assert list(space) == ["optimizer", "optimizer.lr"]
    assert space["optimizer"] == ("{name: SGD, lr: 1}", "{name: Adam}")
    assert not space["optimizer.lr"].is_whole
    assert read("patch.batch: {low: 2, high: 8, step: 2}")["patch.batch"].is_whole
    assert read("a: [1, '1', null, [8, 8]]")["a"] == ("1", '"1"', "null", "[8, 8]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold the keys to search over, in lines such as optimizer.lr"),
        ("seed: 3", "seed needs a range such as .*, or a list of choices; got 3"),
        ("seed: []", "seed needs a range such as"),
        ("seed: [1, 1]", "the choices of seed must differ, got 1, 1"),
        ("output: [a, b]", "output cannot be searched over: each trial has a folder of its own"),
        ("seed: {lo: 1, high: 2}", r"seed in .*search.yaml cannot be used:\n .*did you mean 'low'"),
        ("seed: {low: 3, high: 2}", "low must be below high, got low: 3 and high: 2"),
        ("seed: {low: 0, high: 2, log: true}", "log: true takes low above 0 and no step, got low: 0"),
        (
            "seed: {low: 0.1, high: 0.35, step: 0.1}",
            "high must be low plus a multiple of step, got low: 0.1, high: 0.35",
        ),
        ("seed: {low: 1, high: true}", "high: needed: a number, got True"),
    ],
)
def test_a_wrong_space_is_refused_with_the_rule(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file .*; write lines such as"):
        read_space(tmp_path / "none.yaml")
