"""Read and write plain values in the core schema of YAML 1.2.

PyYAML follows YAML 1.1: ``1e-3`` is a string, ``010`` is 8, ``1:30`` is 90, ``no`` is false, and the last of two equal
keys silently wins. So PyYAML only parses, and this module builds the values from the parser's events. It refuses
anchors, aliases, merge keys and tags: 500 bytes of nested aliases can expand to 9**9 values.
"""

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from volseg.errors import ConfigError
from volseg.files import decode_text, read_bytes

DEEPEST = 50
"""Most nested levels of lists and sections."""

MOST_CHARACTERS = 1 << 24
MOST_VALUES = 1_000_000
"""Limit on values; the ``task.yaml`` of 100,000 cases has half as many."""

MOST_DIGITS = 300
"""Larger integers do not fit into a float."""

PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The faster parser of libyaml, if PyYAML was built with it."""

WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
SURROGATE = re.compile("[\ud800-\udfff]")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class _Dumper(yaml.SafeDumper):
    """Write a shared value in each place, and quote strings that YAML 1.1 or 1.2 would read as other values."""

    def ignore_aliases(self, _: Any) -> bool:
        """Return True."""
        return True


for _tag, _pattern in (("int", INTEGER), ("float", FLOAT)):
    _Dumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), list("-+.0123456789")
    )


def dump_yaml(value: Any, **style: Any) -> str:
    """Return plain values as YAML; `parse_yaml` reads the same values."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    return text


def read_yaml(path: Path, source: str) -> Any:
    """Return the plain values of a YAML file; see `parse_yaml`.

    Raises
    ------
    ConfigError
        If the file is not plain YAML; the message names ``source`` and the line.
    OSError
        If the file cannot be read.
    """
    try:
        text = decode_text(read_bytes(path, 4 * MOST_CHARACTERS))
    except ValueError as fault:
        raise ConfigError(
            f"{source} is {fault}; name a YAML file saved as UTF-8, or the folder of a data set"
        ) from fault
    return parse_yaml(text, source)


def parse_yaml(text: str, source: str) -> Any:
    """Return the plain values in ``text``.

    Raises
    ------
    ConfigError
        If ``text`` is not plain YAML; the message names ``source`` and the line.

    Examples
    --------
    >>> parse_yaml("lr: 1e-3", "config.yaml")
    {'lr': 0.001}
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{source} has {len(text)} characters; needed: at most {MOST_CHARACTERS}")
    try:
        return _Builder(yaml.parse(text, Loader=PARSER)).build()
    except yaml.MarkedYAMLError as fault:
        raise ConfigError(f"{source} is not valid YAML: {_explain(fault, text)}") from fault
    except (yaml.YAMLError, ValueError) as fault:  # characters and escapes outside Unicode
        raise ConfigError(f"{source} is not valid YAML: {fault}") from fault


def _explain(fault: yaml.MarkedYAMLError, text: str) -> str:
    problem = ", ".join(part for part in (fault.context, fault.problem) if part)
    mark = fault.problem_mark or fault.context_mark
    if mark is None:
        return problem
    lines = text.splitlines() or [""]
    shown = lines[min(mark.line, len(lines) - 1)]
    remedy = "\nindent with spaces: YAML does not allow tabs" if "\t" in shown[: mark.column + 1] else ""
    return f"{problem}\n  in line {mark.line + 1}, column {mark.column + 1}: {shown[:80]!r}{remedy}"


class _Builder:
    """Build the values of one document from the parser's events."""

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self._events = events
        self._num_values = 0

    def build(self) -> Any:
        """Return the value of the document; None for an empty document."""
        next(self._events)  # the stream's start
        start = next(self._events)
        if isinstance(start, yaml.StreamEndEvent):
            return None
        assert isinstance(start, yaml.DocumentStartEvent)
        if start.version not in (None, (1, 2)):
            _refuse(start, "it declares a version of YAML other than 1.2; remove the %YAML line")
        value = self._build(next(self._events), 0)
        next(self._events)  # the document's end
        if not isinstance(further := next(self._events), yaml.StreamEndEvent):
            _refuse(further, "a second document begins here; keep only one")
        return value

    def _build(self, event: Any, depth: int) -> Any:
        """Return the value that begins with an event."""
        self._num_values += 1
        if self._num_values > MOST_VALUES:
            _refuse(event, f"it contains more than {MOST_VALUES} values")
        if depth > DEEPEST:
            _refuse(event, f"it is nested too deeply: more than {DEEPEST} levels")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            _refuse(event, f"anchors and aliases (&{event.anchor}) are not supported; write the value in each place")
        if event.tag is not None:
            _refuse(event, f"tags ({event.tag}) are not supported; write the plain value, with quotes around text")
        if isinstance(event, yaml.ScalarEvent):
            return _parse_scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._build(item, depth + 1) for item in self._until(yaml.SequenceEndEvent)]
        mapping: dict[Hashable, Any] = {}
        for key in self._until(yaml.MappingEndEvent):
            name = self._build_key(key, depth)
            if name in mapping:
                _refuse(key, f"the key {key.value!r} occurs twice; keep one")
            mapping[name] = self._build(next(self._events), depth + 1)
        return mapping

    def _build_key(self, event: Any, depth: int) -> Hashable:
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == "<<":
            _refuse(event, "merge keys (<<) are not supported; write the keys in each place")
        if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            _refuse(event, "a key is a list or a section; needed: text")
        key: Hashable = self._build(event, depth + 1)
        if isinstance(key, int) and abs(key) >= 2**63:  # thousands of such keys can have the same hash
            _refuse(event, f"a key is the number {str(key)[:40]}..., which needs more than 64 bits")
        return key

    def _until(self, end: type[yaml.Event]) -> Iterator[Any]:
        while not isinstance(event := next(self._events), end):
            yield event


def _parse_scalar(event: yaml.ScalarEvent) -> Any:
    """Return the value of a scalar: a string if quoted, else by the core schema."""
    text: str = event.value
    if event.implicit[0]:  # not quoted
        if text in WORDS:
            return WORDS[text]
        if INTEGER.fullmatch(text):
            if len(text) > MOST_DIGITS:
                _refuse(event, f"a number has {len(text)} digits; needed: at most {MOST_DIGITS}")
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if FLOAT.fullmatch(text):
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if SURROGATE.search(text):
        _refuse(event, "an escape sequence denotes a surrogate, which is half a character; write the character itself")
    return text


def _refuse(event: Any, problem: str) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)
