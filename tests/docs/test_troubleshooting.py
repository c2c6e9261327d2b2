"""What troubleshooting calls an error of ours is one: the program says its words. Every type of error is there."""

import ast
import re
from functools import cache

from documented import ROOT

from volseg import errors

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OURS = re.findall(r"^### `([^`]+)` \(`(\w+)`\)$", PAGE, flags=re.M)
BASES = {"VolsegError"}


@cache
def sentences() -> list[str]:
    """Return the strings of the program, what is put into them standing as ``{}``."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "volseg").rglob("*.py")]
    return [text for tree in trees for node in ast.walk(tree) if (text := text_of(node))]


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def is_said(message: str) -> bool:
    """Say whether one string of the program has the parts of a message in their order."""
    return any(has_parts(sentence, message.split("...")) for sentence in sentences())


def has_parts(sentence: str, parts: list[str]) -> bool:
    place = 0
    for part in parts:
        if (found := sentence.find(part, place)) < 0:
            return False
        place = found + len(part)
    return True


def test_the_program_says_so():
    assert {kind for _, kind in OURS} <= {*errors.__all__}
    assert [message for message, _ in OURS if not is_said(message)] == []


def test_what_nobody_says_is_found():
    assert not is_said("the loss is not finite in month ..., batch ...")


def test_every_type_of_error_is_on_the_page():
    assert {name for name in errors.__all__ if f"`{name}`" not in PAGE} - BASES == set()
