"""Write the table of kinds of findings into the documentation.

``python -m volseg.data.checks.document docs/data-check.md``
"""

import sys
from pathlib import Path

from volseg.data.checks.kinds import KINDS

__all__ = ["with_kinds"]

BEGIN, END = "<!-- kinds of findings: generated -->", "<!-- end of kinds of findings -->"


def kinds_table() -> str:
    """Return the kinds as a Markdown table."""
    rows = [
        f"| `{name}` | {kind.severity} | {kind.says} | {kind.rule} | {kind.remedy} | {kind.repaired} |"
        for name, kind in KINDS.items()
    ]
    head = ["| kind | | what it is | what is expected | remedy | `--fix` |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


def with_kinds(text: str) -> str:
    """Return a page with its table brought up to date."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{kinds_table()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_kinds(page.read_text(encoding="utf-8")), encoding="utf-8")
