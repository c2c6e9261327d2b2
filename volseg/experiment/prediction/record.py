"""What a folder of predictions was made with, so that a prediction that was interrupted can go on.

``predicted.jsonl`` is beside the label maps. Its first line is written before the first of them: weights and settings.
Then a line follows each label map, so that one of an earlier prediction is never taken for one of this, and each case
that failed.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

from volseg.checkpointing.components import describe_components
from volseg.data.cases import Case
from volseg.data.json_files import parse_json
from volseg.data.readers import list_files, match_suffix
from volseg.errors import ConfigError
from volseg.evaluation.folders import RECORD
from volseg.experiment.prediction.files import PredictionFiles
from volseg.experiment.prediction.trained import Trained
from volseg.files import digest_file, replacing

__all__ = ["PredictionRecord", "identify", "list_predicted"]


VOLUMES = "volumes.csv"
SETTINGS = ("network", "preprocessing", "inference")
"""Sections of the config that a label map depends on, with the weights."""


class PredictionRecord:
    """The record of the predictions in a folder.

    Parameters
    ----------
    files : PredictionFiles
        What is written, and where.
    trained : Trained
        What predicts.
    checkpoint : str
        Which of a training's checkpoints that is.
    """

    def __init__(self, files: PredictionFiles, trained: Trained, checkpoint: str) -> None:
        self._folder, self._files = files.folder, files
        self._lock = Lock()
        values, task = trained.config.model_dump(mode="json"), trained.task
        self._made_by = {
            "checkpoint": checkpoint,
            "weights": trained.weights,
            "channels": list(task.modalities),
            "labels": [*task.class_values, *map(list, task.regions.values())],
            "precision": trained.config.training.precision,
            **{name: values[name] for name in SETTINGS},
            **files.settings,
            **({"components": own} if (own := describe_components(trained.config)) else {}),
        }
        self._digest = blake2b(json.dumps(self._made_by, sort_keys=True).encode(), digest_size=8).hexdigest()

    def begin(self) -> None:
        """Describe this prediction; keep the record of predictions with the same weights and settings.

        Predictions that were made otherwise are no longer recorded.
        """
        lines = self._read()
        if lines and not self._list_changes(_parse(lines[0])):
            if not lines[-1].endswith("\n"):  # what was written when a process was killed must not spoil the next line
                self._append("\n")
            return
        with replacing(self._folder / RECORD) as partial:
            partial.write_text(json.dumps(self._made_by) + "\n", encoding="utf-8")

    def list_done(self, cases: Sequence[Case]) -> dict[str, Path]:
        """Return the label maps of this prediction that are whole and of the same images; none where it never began.

        Raises
        ------
        ConfigError
            Those in the folder were made by another checkpoint or with other settings.
        """
        made_by, *entries = [_parse(line) for line in self._read()] or [self._made_by]
        if changed := self._list_changes(made_by):
            raise ConfigError(
                f"the predictions in {self._folder} were made otherwise ({', '.join(changed)} differ); name another "
                "folder by --output, or predict all images again by --overwrite in place of --resume"
            )
        known = {entry.get("case"): entry for entry in entries}
        done = {}
        for case in cases:
            entry, path = known.get(case["case"], {}), self._files.name_label_map(case)
            if entry.get("made_by") != self._digest:  # by another process, that was writing here when this one began
                continue
            same_image = {"image", "ml"} <= entry.keys() and entry["image"] == identify(case)
            is_whole = all(file.is_file() for file in self._files.name_all(case))
            if same_image and is_whole and entry.get("label_map") == digest_file(path):
                done[case["case"]] = path
        return done

    def list_existing(self, cases: Sequence[Case]) -> dict[str, Path]:
        """Return the label maps that exist, whatever made them."""
        paths = {case["case"]: self._files.name_label_map(case) for case in cases}
        return {name: path for name, path in paths.items() if path.is_file()}

    def add(self, case: Case, image: Sequence[Any] | None, volumes: Mapping[str, float]) -> None:
        """Record that the label map of a case is whole; from any thread.

        Parameters
        ----------
        case : Case
            With paths.
        image : sequence
            What `identify` said before the image was read: since then another may have taken its place.
        volumes : mapping
            Of each label or region (ml), for ``volumes.csv``.
        """
        digest = digest_file(self._files.name_label_map(case))
        self._add(
            {"case": case["case"], "made_by": self._digest, "image": image, "label_map": digest, "ml": dict(volumes)}
        )

    def write_volumes(self) -> Path:
        """Write ``volumes.csv``, the volume (ml) of each label in each case that was predicted; return its path."""
        own = [entry for entry in map(_parse, self._read()) if entry.get("made_by") == self._digest]
        entries = {entry["case"]: entry["ml"] for entry in own if "ml" in entry}
        path = self._folder / VOLUMES
        with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["case", *dict.fromkeys(name for volumes in entries.values() for name in volumes)])
            for case, volumes in sorted(entries.items()):
                rows.writerow([case, *(f"{volume:.3f}" for volume in volumes.values())])
        return path

    def add_failure(self, case: Case, error: str, message: str) -> None:
        """Record that a case failed; it is tried again when the prediction goes on."""
        self._add({"case": case["case"], "error": error, "message": message})

    def _add(self, entry: Mapping[str, Any]) -> None:
        self._append(json.dumps(entry) + "\n")

    def _append(self, text: str) -> None:
        with self._lock, (self._folder / RECORD).open("a", encoding="utf-8") as file:
            file.write(text)

    def _read(self) -> list[str]:
        try:
            text = (self._folder / RECORD).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        return text.splitlines(keepends=True)

    def _list_changes(self, made_by: Mapping[str, Any]) -> list[str]:
        """Return what this prediction is made with differently."""
        keys = made_by.keys() | self._made_by.keys()
        return sorted(key for key in keys if made_by.get(key) != self._made_by.get(key))


def _parse(line: str) -> Mapping[str, Any]:
    """Return what a line says; nothing for one that was cut off, whose label map is then made again."""
    try:
        entry = parse_json(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def list_predicted(folder: Path) -> dict[str, list[Path]]:
    """Return the images of the cases whose label maps `PredictionRecord` recorded in a folder."""
    entries = map(_parse, (folder / RECORD).read_text(encoding="utf-8", errors="replace").splitlines())
    # Behind the paths are the number of files, their bytes, and a time.
    return {entry["case"]: list(map(Path, entry["image"][:-3])) for entry in entries if entry.get("image")}


def identify(case: Case) -> list[Any] | None:
    """Return where an image lies, its bytes, and when it was last written; None if it is gone.

    Enough to tell it from another of its name: without compression all of one shape have as many bytes.
    """
    images = list_files(case["image"])
    try:
        files = [file.stat() for image in images for file in _list_beside(image)]
        size, written = sum(file.st_size for file in files), max((file.st_mtime_ns for file in files), default=0)
        return [*(str(image.resolve()) for image in images), len(files), size, written]
    except OSError:
        return None


def _list_beside(image: Path) -> Iterator[Path]:
    """Yield the files of an image: of a DICOM series, for which one of its files may stand, those of its folder."""
    if image.is_dir():
        yield from image.iterdir()
    elif match_suffix(image) is None:
        yield from (file for file in image.parent.iterdir() if file.is_file())
    else:
        yield image
