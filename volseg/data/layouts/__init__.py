"""Data sets as people have them: MSD's folders, nnU-Net's, folders of pairs, tables of paths.

Each module reads one layout into the same `volseg.data.cases.Task`; `load_task` finds out which it is. Nothing
after it knows of layouts.
"""

from volseg.data.layouts.loading import find_task, load_task

__all__ = ["find_task", "load_task"]
