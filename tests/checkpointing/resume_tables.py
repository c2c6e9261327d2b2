"""The tables of docs/interrupted.md: what a checkpoint holds, and what may differ on resume.

``python tests/checkpointing/resume_tables.py --write`` brings the page up to date.
"""

import sys
from dataclasses import fields
from pathlib import Path

from volseg.checkpointing.compatible import RULES, list_keys
from volseg.checkpointing.state import TrainingState

PAGE = Path(__file__).parents[2] / "docs" / "interrupted.md"


def _table(*rows: tuple[str, ...]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *rest])


def _name(what: str) -> str:
    """Return the first column of a rule: keys of the config as code, a section with an asterisk."""
    return ", ".join(f"`{key}*`" if key.endswith(".") else f"`{key}`" for key in list_keys(what)) or what


TABLES = {
    "content of a checkpoint": _table(
        ("key", "holds"), *((f"`{known.name}`", known.metadata["holds"]) for known in fields(TrainingState))
    ),
    "rules of resume": _table(
        ("what", "when a run goes on", "why", "kept in"),
        *((_name(what), rule.resume, rule.why, f"`{rule.kept_in}`") for what, rule in RULES.items()),
    ),
}
"""Markdown tables by the names of their places in the page."""


def with_tables(text: str) -> str:
    """Return a page with its tables brought up to date."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
