"""What a run came to, on one page for browsers and in short for terminals, from the files of its folder alone.

One content (`volseg.reporting.content`) is gathered from a folder and written twice: as ``report.html``, one file that
asks nothing of any other, and in short as ``report.md``. Nothing here imports torch, nor anything that does.
"""

from volseg.reporting.writing import NAME, write_brief, write_report

__all__ = ["NAME", "write_brief", "write_report"]
