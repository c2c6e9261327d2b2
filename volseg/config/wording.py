"""What pydantic found, in the words of who writes the YAML: its tuples and models are lists and sections there."""

import re
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["say_what_is_needed", "suggest_plain"]

PLAIN = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "dict_type": "a section of `key: value` lines",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', the first of them a letter or a digit",
}
"""What is needed, by pydantic's kind of fault."""

SECTIONS = ("model_type", "model_attributes_type")
LISTS = ("tuple_type", "list_type")
LENGTHS = {"too_long": ("max_length", "at most"), "too_short": ("min_length", "at least")}

TRUTHS = ("yes", "no", "on", "off")
"""Truth values of YAML 1.1 that are texts in YAML 1.2."""

LIST = re.compile(r"\(?[^,\[\]]+(,[^,\[\]]+)+\)?")


def suggest_plain(value: object) -> str | None:
    """Return how to write the number or truth value that a text may mean; None for other values.

    >>> suggest_plain("0,003"), suggest_plain("1_000"), suggest_plain("off"), suggest_plain("1,2,3")
    ('write 0.003, with a point', 'write 1000, without _', 'write true or false', None)
    """
    if not isinstance(value, str):
        return None
    if re.fullmatch(r"[-+]?\d+,\d+", value):
        return f"write {value.replace(',', '.')}, with a point"
    if re.fullmatch(r"[-+]?\d+(e[-+]?\d+)?(,\d+(e[-+]?\d+)?)+", value, re.IGNORECASE) and "e" in value.lower():
        return f"write a number with a point, or a list: [{value}]"
    if re.fullmatch(r"[-+]?\d+(_\d+)+", value):
        return f"write {value.replace('_', '')}, without _"
    return "write true or false" if value.lower() in TRUTHS else None


def say_what_is_needed(error: Mapping[str, Any], key: str, fields: Collection[str] = ()) -> str:
    """Return the rule that a value breaks, and how its writer probably meant it.

    Parameters
    ----------
    error : mapping
        One of pydantic's ``errors()``.
    key : str
        Name of the section or value, for an example.
    fields : collection of str
        Keys of the section that is needed there, or of each in the list that is.
    """
    kind, came = error["type"], error["input"]
    if kind in SECTIONS:
        return f"needed: a section of `key: value` lines{_show_section(came, key, fields)}"
    if kind in LISTS:
        return f"needed: a list in brackets{_show_list(came, key, fields)}"
    if kind in LENGTHS:
        name, most = LENGTHS[kind]
        return f"needed: {most} {error['ctx'][name]} item(s) in the list"
    if kind not in PLAIN:
        return error["msg"].removeprefix("Value error, ")
    is_truth = isinstance(came, str) and came.lower() in TRUTHS  # advice that helps only if a truth value is needed
    plain = suggest_plain(came) if kind.startswith(("int", "float")) and not is_truth else None
    return f"needed: {PLAIN[kind]}{f'; {plain}' if plain else ''}"


def _show_section(came: Any, key: str, fields: Collection[str]) -> str:
    if came is None:
        return "; leave the key out for its defaults"
    if "name" in fields and isinstance(came, str):
        return f", such as {key}: {{name: {came}}}"
    return f" with keys of {', '.join(sorted(fields))}" if fields else ""


def _show_list(came: Any, key: str, fields: Collection[str]) -> str:
    """Return how a list is written of what came without brackets."""
    is_component = "name" in fields
    if isinstance(came, Mapping):
        if came and all(str(name).isdigit() for name in came):
            return (
                f", of which --set could change item {next(iter(came))}; the config has none, so write it whole, such "
                f"as {key}: [{{name: NAME}}]"
            )
        shown = ", ".join(f"{name}: {value}" for name, value in came.items())
        return f", such as {key}: [{{{shown}}}]"
    if is_component:
        return f", such as {key}: [{{name: {came}}}]"
    if isinstance(came, str) and LIST.fullmatch(came):
        return f", such as [{came.strip('()')}]"
    return f", such as [{came}, {came}, {came}]" if isinstance(came, int | float) else f", such as [{came}]"
