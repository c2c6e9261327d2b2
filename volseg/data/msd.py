"""The names under which a data set was read when MSD's was the only layout; `volseg.data.layouts` reads them all."""

from volseg.data.layouts import find_task, load_task
from volseg.data.layouts.declared import read_labels, read_modalities

__all__ = ["find_task", "load_task", "read_labels", "read_modalities"]
