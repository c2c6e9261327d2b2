"""Read and preprocess cases, and keep the label on its own grid for validation."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from volseg.data.cases import Case, Task
from volseg.data.labels import to_classes
from volseg.data.readers import Read, read_volume
from volseg.data.threads import compute_in_one_thread, map_in_threads
from volseg.transforms.preprocessing import Preprocessing as Composed
from volseg.transforms.preprocessing import choose_label_dtype

Preprocessing = Callable[[Case], Case]


def prepare(
    case: Case, preprocessing: Preprocessing, *, keep_reference: bool = False, task: Task | None = None
) -> Case:
    """Read ``image`` and, if the case has one, ``label``, and preprocess them.

    Parameters
    ----------
    case : Case
        The case with paths.
    preprocessing : callable
        See `volseg.transforms.build_preprocessing`.
    keep_reference : bool
        Add the fields ``reference``, the label ``(1, D, H, W)`` as read (for comparison with a prediction), and
        ``reference_file``.
    task : Task, optional
        Task of the label's values: the label becomes class indices (`volseg.data.labels`), as a training needs it.
    """
    fields = [field for field in ("image", "label") if field in case]
    return preprocess(Read(fields, task)(case), case, preprocessing, keep_reference, task)


def preprocess(
    read: Case, paths: Case, preprocessing: Preprocessing, keep_reference: bool, task: Task | None = None
) -> Case:
    """Preprocess a case that has been read; ``paths`` is the case with paths, the rest as for `prepare`.

    A `volseg.transforms.Preprocessing` empties ``read``, so that a large volume is not held beside its results.
    """
    label = read.get("label") if keep_reference else None
    if isinstance(read.get("stage"), str | Path):
        read["stage"] = read_volume(read["stage"])
    with compute_in_one_thread():
        prepared = preprocessing.consume(read) if isinstance(preprocessing, Composed) else preprocessing(read)
    if task is not None and "label" in prepared:
        prepared["label"] = to_classes(prepared["label"], task, paths)
    if label is not None:
        # As StoreVoxels keeps labels: a quarter of the bytes read.
        prepared["reference"] = label.to(choose_label_dtype(label))
        prepared["reference_file"] = Path(paths["label"])
    return prepared


def prepare_all(cases: Sequence[Case], preprocessing: Preprocessing, *, keep_reference: bool = False) -> list[Case]:
    """Prepare cases in threads, unchecked; the parameters are those of `prepare`."""
    return list(map_in_threads(partial(prepare, preprocessing=preprocessing, keep_reference=keep_reference), cases))
