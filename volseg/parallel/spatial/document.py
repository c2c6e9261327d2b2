"""Write the table of supported functions into the documentation.

``python -m volseg.parallel.spatial.document docs/spatial.md``
"""

import sys
from pathlib import Path

import volseg.parallel.spatial.operators  # noqa: F401  (fills the operator table)
from volseg.parallel.spatial.table import documented

__all__ = ["with_table"]

BEGIN, END = "<!-- operator table: generated -->", "<!-- end of operator table -->"


def operator_table() -> str:
    """Return the supported functions by family, as a Markdown table."""
    lines = ["| family | functions |", "| --- | --- |"]
    for family, names in sorted(documented().items()):
        lines.append(f"| {family} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return a page with an updated table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{operator_table()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
