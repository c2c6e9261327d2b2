"""Read folders of images and labels without a list, and pair the files by their names.

One rule covers all arrangements. A file whose name ends in a word for labels (``case_seg``) is a label map, and the
part before that word is the case. Every other file is an image of the case that its name begins with, and the rest is
the name of its channel. If images and labels are in folders of those names, the folder gives the kind. If each case has
a folder, the folder's name is the case. Anything else is refused with a list of the files: ambiguity is never resolved
by a guess. nnU-Net's ``imagesTr/CASE_0000.nii.gz`` and ``labelsTr/CASE.nii.gz`` follow the same rule.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volseg.data.cases import Task
from volseg.data.dicom.labels import DicomLabel, find_dicom_label, read_image_text
from volseg.data.layouts.declared import make_task
from volseg.data.layouts.files import list_images, list_labels, log_counts, require_id, sort_cases
from volseg.data.layouts.naming import (
    SEPARATORS,
    cut_channel,
    image_of,
    log_once,
    match_channels,
    name_channels,
    name_labels,
)
from volseg.data.readers import SUFFIXES, match_suffix, stem
from volseg.errors import DataError
from volseg.formatting import list_some

IMAGE_FOLDERS = ("images", "image", "imagesTr", "img", "imgs", "scans", "volumes")
LABEL_FOLDERS = ("labels", "label", "labelsTr", "masks", "mask", "seg", "segs", "segmentation", "segmentations")
"""Names of the two folders, in upper or lower case."""

TEST_FOLDERS = ("imagesTs",)
"""Folders of images without labels."""

LABEL_WORDS = ("label", "labels", "mask", "masks", "seg", "segm", "segs", "segmentation")
"""Last word of a label map's name."""

UNNAMED = ("", "image", "img", "scan", "volume")
"""Words in the place of a channel's name, if an image has only one file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """The images and labels of a folder, before they are paired."""

    images: tuple[tuple[str, Path], ...]
    labels: tuple[tuple[str, Path], ...]
    """Each with the case that its folder names; empty if the names of files give the case."""
    test: Path | None = None
    """Folder of images without labels."""


def detect_arrangement(folder: Path) -> Arrangement | None:
    """Return the layout of a folder, or None if it has no images and labels.

    Raises
    ------
    DataError
        If there is more than one folder of images or of labels, or if there are images next to such folders.
    """
    children = [child for child in sorted(folder.glob("*/")) if not child.name.startswith((".", "_"))]
    images, labels, tests = (
        [child for child in children if child.name.casefold() in {name.casefold() for name in names}]
        for names in (IMAGE_FOLDERS, LABEL_FOLDERS, TEST_FOLDERS)
    )
    children = [child for child in children if child not in tests]
    test = tests[0] if tests else None
    loose = list_labels(folder)
    if images and labels:
        if len(images) > 1 or len(labels) > 1 or loose:
            found = list_some([path.name for path in (*images, *labels, *loose)])
            raise DataError(f"{folder} has {found}; needed: one folder of images, one of labels, and no other images")
        return Arrangement(
            images=tuple(("", path) for path in _list_volumes(images[0])),
            labels=tuple(
                ("", path) for path in _list_volumes(labels[0]) if match_suffix(path) or find_dicom_label(path)
            ),
            test=test,
        )
    by_folder = {child: volumes for child in children if (volumes := _list_volumes(child))}
    if any(_is_label(path) for path in loose):
        if by_folder:
            found = list_some([path.name for path in (*loose, *by_folder)])
            raise DataError(f"{folder} contains images and folders of images ({found}); arrange all cases in one way")
        return _sort([("", path) for path in _list_volumes(folder, children)], test)
    if not loose and any(_is_label(path) for volumes in by_folder.values() for path in volumes):
        return _sort([(child.name, path) for child, volumes in by_folder.items() for path in volumes], test)
    return None


def _list_volumes(folder: Path, children: Sequence[Path] | None = None) -> list[Path]:
    """Return the volumes of a folder: files of images, labels in DICOM, and folders of slices among ``children``.

    A folder that contains slices and a label is itself a volume.
    """
    children = sorted(folder.glob("*/")) if children is None else children
    series = [child for child in children if not child.name.startswith((".", "_")) and _may_be_series(child)]
    files = list_labels(folder)
    is_series = bool(files) and _may_be_series(folder) and len(files) < len([*folder.iterdir()])
    return sorted([*files, *series, *([folder] if is_series else [])])


def _may_be_series(folder: Path) -> bool:
    """Return whether a folder has files and none is an image by its suffix; the reader determines their kind."""
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return bool(files) and all(path.is_file() for path in files) and not list_images(folder)


def _sort(volumes: Sequence[tuple[str, Path]], test: Path | None) -> Arrangement:
    return Arrangement(
        images=tuple((case, path) for case, path in volumes if not _is_label(path)),
        labels=tuple((case, path) for case, path in volumes if _is_label(path)),
        test=test,
    )


def _is_label(path: Path) -> bool:
    return _cut_label_word(stem(path)) is not None or find_dicom_label(path) is not None


def _cut_label_word(name: str) -> str | None:
    """Return the part before the word for labels at the end of a name, or None without such a word."""
    found = cut_channel(name, LABEL_WORDS) or cut_channel(name.lstrip(SEPARATORS), LABEL_WORDS)
    return None if found is None else found[0]


def load_pairs(
    folder: Path, arrangement: Arrangement, manifest: tuple[Path, Mapping[str, Any]] | None, *, require_files: bool
) -> Task:
    """Return the task of a folder of pairs; see `volseg.data.layouts.load_task`.

    Channels and labels are named as in ``manifest``; without one, after the files and the values.
    """
    source, declared = manifest or (folder / "dataset.json", {})
    labels_of = _name_cases(arrangement, folder)
    images_of = _group_channels(arrangement.images, labels_of, folder)
    if not images_of:
        raise DataError(f"{folder} contains no image with a label; needed: files with {', '.join(SUFFIXES)}, or DICOM")
    words = _list_words(images_of)
    _require_channels(images_of, words, folder)
    modalities, order = match_channels(words, name_channels(declared, source), source)
    tests_of = {} if arrangement.test is None else _group_tests(_list_volumes(arrangement.test), words)
    _require_channels(tests_of, words, folder)
    cases, tests = (
        [
            {
                "case": require_id(key[0] or key[1], str(folder)),
                "image": image_of([channels[words[number]] for number in order]),
                **({"label": labels_of[key]} if found is images_of else {}),
            }
            for key, channels in found.items()
        ]
        for found in (images_of, tests_of)
    )
    log_counts(declared, {"training": cases}, source, logging.WARNING)
    training, test = sort_cases(cases, tests, source, require_files=require_files)
    labels = name_labels(declared, source, [case["label"] for case in training], folder, require_files=require_files)
    log_once(f"{folder}: {len(training)} pairs of image and label, channels {', '.join(modalities)}")
    return make_task(source, declared, modalities, labels, (training, test))


Key = tuple[str, str]
"""Key of a case: the folder named after it, and the beginning of its files' names; one may be empty."""


def _name_cases(arrangement: Arrangement, folder: Path) -> dict[Key, Path]:
    """Return the label map of each case."""
    begun = {start for _, path in arrangement.images for start in _list_starts(stem(path))}
    found: dict[Key, Path] = {}
    first: dict[Key | str, Path] = {}
    by_series: dict[str, str] = {}
    for group, path in arrangement.labels:
        name = stem(path)
        cut = _cut_label_word(name)
        # In a folder of labels the word may be part of the case's own name.
        begin = name if cut is None or (not group and name in begun) else cut
        if group and find_dicom_label(path):
            begin = ""
        elif begin not in begun and (label := DicomLabel.open(path)) is not None:
            by_series = by_series or {read_image_text(image): stem(image) for _, image in arrangement.images}
            begin = by_series.get(label.series, begin)
        key = (group, begin)
        other = first.setdefault(group or key, path)  # a case's folder has one label
        if other != path:
            raise DataError(f"{folder}: {other.name} and {path.name} are both labels of one case; keep one of them")
        found[key] = path
    return found


def _list_starts(name: str) -> Iterator[str]:
    """Yield the possible case names of a file with this name: all of it, and each part before a separator."""
    yield name
    for place in range(len(name) - 1, -1, -1):
        if name[place] in SEPARATORS:
            yield name[:place]
    yield ""


def _group_channels(
    images: Sequence[tuple[str, Path]], cases: Mapping[Key, Path], folder: Path
) -> dict[Key, dict[str, Path]]:
    """Return the files of each case's image by the name of their channel, and refuse files without a partner."""
    found: dict[Key, dict[str, Path]] = defaultdict(dict)
    alone = []
    for group, path in images:
        name = stem(path)
        key = next(((group, start) for start in _list_starts(name) if (group, start) in cases), None)
        if key is None:
            alone.append(path)
            continue
        channel = name[len(key[1]) :].lstrip(SEPARATORS)
        channel = "" if channel.casefold() in UNNAMED or path.name == group else channel
        if channel in found[key]:
            both = f"{found[key][channel].name} and {path.name}"
            raise DataError(f"{folder}: {both} are the same channel of one case; keep one of them")
        found[key][channel] = path
    alone += [path for key, path in cases.items() if key not in found]
    if alone:
        labels = {path: DicomLabel.open(path) for path in sorted(alone)}
        names = list_some(
            [f"{path.relative_to(folder)}{f' ({label})' if label else ''}" for path, label in labels.items()]
        )
        raise DataError(
            f"{folder}: {len(alone)} file(s) have no partner: {names}; the name of an image must begin with its case, "
            f"that of a label must be its case and, outside a folder of labels, one of {', '.join(LABEL_WORDS)}. Move "
            f"images without labels to {TEST_FOLDERS[0]}, or list the pairs in a table (CSV)"
        )
    return {key: found[key] for key in sorted(found)}


def _group_tests(images: Sequence[Path], words: Sequence[str]) -> dict[Key, dict[str, Path]]:
    """Return the files of each image without a label; their names end in the names of the training channels."""
    found: dict[Key, dict[str, Path]] = defaultdict(dict)
    for path in images:
        case, channel = (stem(path), 0) if words == [""] else cut_channel(stem(path), words) or (stem(path), None)
        if channel is None or words[channel] in found["", case]:
            raise DataError(
                f"{path} does not end in one of the training channels {', '.join(words)}, or repeats one; name test "
                "images like training images, or move the file away"
            )
        found["", case][words[channel]] = path
    return found


def _list_words(images: Mapping[Key, Mapping[str, Path]]) -> list[str]:
    """Return the words for the channels, in numerical or alphabetical order."""
    words = {word for channels in images.values() for word in channels}
    return sorted(words, key=lambda word: (len(word), word) if all(map(str.isdigit, words)) else (0, word))


def _require_channels(images: Mapping[Key, Mapping[str, Path]], words: Sequence[str], folder: Path) -> None:
    """Raise unless every case has one file for each channel."""
    wrong = [
        f"{key[0] or key[1]} has {', '.join(sorted(path.name for path in channels.values()))}"
        for key, channels in images.items()
        if len(channels) < len(words) or (len(words) > 1 and "" in channels)
    ]
    if wrong:
        shown = ", ".join(word or "(no name)" for word in words)
        raise DataError(
            f"{folder}: not every case has one file for each of the channels {shown}: {list_some(wrong, 3)}; needed: "
            "the same channels after each case's name, or a table (CSV) that lists the files"
        )
