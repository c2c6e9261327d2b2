"""Report the results of a run from the files of its folder, as a page for browsers and in short for terminals.

One content (`volseg.reporting.content`) is read from a folder and written twice: as ``report.html``, a self-contained
file, and in short as ``report.md``. This package does not import torch, not even indirectly.
"""

from volseg.reporting.writing import NAME, write_brief, write_report

__all__ = ["NAME", "write_brief", "write_report"]
