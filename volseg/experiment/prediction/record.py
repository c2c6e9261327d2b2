"""Record the weights and settings of a folder of predictions, so that an interrupted prediction can resume.

``predicted.jsonl`` is beside the label maps. Its first line has the weights and settings, and is written before the
first label map. Then each label map and each failed case adds a line. So a label map of an earlier prediction never
counts as one of this prediction.
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

VOLUMES = "volumes.csv"
SETTINGS = ("network", "preprocessing", "inference")
"""Sections of the config that a label map depends on, with the weights."""


class PredictionRecord:
    """The record of the predictions in a folder.

    Parameters
    ----------
    files : PredictionFiles
        Files to write.
    trained : Trained
        Networks that predict.
    checkpoint : str
        Name of the networks' checkpoint.
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
        """Describe this prediction, or continue the folder's record of predictions with the same settings.

        Other label maps in the folder no longer count as results.
        """
        lines = self._read()
        if lines and not self._list_changes(_parse(lines[0])):
            if not lines[-1].endswith("\n"):  # a line cut off by a kill must not spoil the next one
                self._append("\n")
            return
        with replacing(self._folder / RECORD) as partial:
            partial.write_text(json.dumps(self._made_by) + "\n", encoding="utf-8")

    def list_done(self, cases: Sequence[Case]) -> dict[str, Path]:
        """Return this prediction's complete label maps whose images are unchanged; none without a record.

        Raises
        ------
        ConfigError
            If those in the folder come from another checkpoint or other settings.
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
            if entry.get("made_by") != self._digest:  # from another process that was writing when this one began
                continue
            same_image = {"image", "ml"} <= entry.keys() and entry["image"] == identify(case)
            is_whole = all(file.is_file() for file in self._files.name_all(case))
            if same_image and is_whole and entry.get("label_map") == digest_file(path):
                done[case["case"]] = path
        return done

    def list_existing(self, cases: Sequence[Case]) -> dict[str, Path]:
        """Return the label maps that exist, from any source."""
        paths = {case["case"]: self._files.name_label_map(case) for case in cases}
        return {name: path for name, path in paths.items() if path.is_file()}

    def add(self, case: Case, image: Sequence[Any] | None, volumes: Mapping[str, float]) -> None:
        """Record that the label map of a case is complete; thread-safe.

        Parameters
        ----------
        case : Case
            The case with paths.
        image : sequence
            Result of `identify` before the image was read: the file may have been replaced since.
        volumes : mapping
            Volume of each label or region (ml), for ``volumes.csv``.
        """
        digest = digest_file(self._files.name_label_map(case))
        self._add(
            {"case": case["case"], "made_by": self._digest, "image": image, "label_map": digest, "ml": dict(volumes)}
        )

    def write_volumes(self) -> Path:
        """Write ``volumes.csv``, the volume (ml) of each label in each predicted case; return its path."""
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
        """Record that a case failed; a resumed prediction tries it again."""
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
        """Return the settings of this prediction that differ from ``made_by``."""
        keys = made_by.keys() | self._made_by.keys()
        return sorted(key for key in keys if made_by.get(key) != self._made_by.get(key))


def _parse(line: str) -> Mapping[str, Any]:
    """Return the content of a line; empty for a line that was cut off, whose label map is predicted again."""
    try:
        entry = parse_json(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def list_predicted(folder: Path) -> dict[str, list[Path]]:
    """Return the images of the cases whose label maps `PredictionRecord` recorded in a folder."""
    entries = map(_parse, (folder / RECORD).read_text(encoding="utf-8", errors="replace").splitlines())
    # The paths are followed by the number of files, their bytes, and a time.
    return {entry["case"]: list(map(Path, entry["image"][:-3])) for entry in entries if entry.get("image")}


def identify(case: Case) -> list[Any] | None:
    """Return the paths of an image, its bytes, and its time of modification, or None if it is gone.

    Enough to distinguish images of one name: without compression, images of one shape have equally many bytes.
    """
    images = list_files(case["image"])
    try:
        files = [file.stat() for image in images for file in _list_beside(image)]
        size, written = sum(file.st_size for file in files), max((file.st_mtime_ns for file in files), default=0)
        return [*(str(image.resolve()) for image in images), len(files), size, written]
    except OSError:
        return None


def _list_beside(image: Path) -> Iterator[Path]:
    """Yield the files of an image; for a DICOM series or one of its files, those of its folder."""
    if image.is_dir():
        yield from image.iterdir()
    elif match_suffix(image) is None:
        yield from (file for file in image.parent.iterdir() if file.is_file())
    else:
        yield image
