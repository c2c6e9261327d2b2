"""Name, write and record the files of a prediction for each case, after postprocessing its label map.

::

    FOLDER/CASE.nii.gz                  label map; CASE.dcm for DICOM segmentations
    FOLDER/probabilities/CASE.nii.gz    probabilities of every class or region
    FOLDER/uncertainty/CASE.nii.gz      entropy of the probabilities
    FOLDER/previous_stage/CASE.nii.gz   label map of a cascade's first stage
    FOLDER/volumes.csv                  volume (ml) of each label
    FOLDER/predicted.jsonl              record: networks, settings and results

The first line of ``predicted.jsonl`` has the weights and settings, and is written before the first label map. Then each
label map and each failed case adds a line. So an interrupted prediction can resume, and a label map of an earlier
prediction never counts as one of this prediction.
"""

import csv
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from volseg.checkpointing.components import describe_components
from volseg.config.nearest import did_you_mean
from volseg.data.cases import Case
from volseg.data.checks.kinds import Remark
from volseg.data.dicom.labels import import_highdicom
from volseg.data.json_files import parse_json
from volseg.data.labels import measure_volumes
from volseg.data.readers import list_files, match_suffix
from volseg.errors import ConfigError, DataError
from volseg.evaluation.folders import RECORD
from volseg.experiment.prediction.trained import Trained
from volseg.files import PARTIAL_SECONDS, digest_file, remove_partials, replacing
from volseg.formatting import format_table
from volseg.inference.dicom_segmentation import require_dicom_source, write_dicom_segmentation
from volseg.inference.original_grid import Prediction
from volseg.inference.postprocessing import Postprocessing
from volseg.inference.writing import write_entropy, write_prediction, write_probabilities

SUFFIXES = {"nifti": ".nii.gz", "dicom-seg": ".dcm", "dicom-rtstruct": ".dcm"}
"""Suffixes of label maps, by format."""


@dataclass(frozen=True, kw_only=True)
class PredictionFiles:
    """Files to write for each case, and their names.

    Raises
    ------
    ConfigError
        For an unknown format, or if the package that writes it is not installed.
    """

    folder: Path
    label_format: str = "nifti"
    probabilities: bool = False
    uncertainty: bool = False
    postprocessing: Postprocessing | None = None

    def __post_init__(self) -> None:
        if self.label_format not in SUFFIXES:
            raise ConfigError(
                f"unknown format of label maps {self.label_format!r}; {did_you_mean(self.label_format, SUFFIXES)}"
            )
        if self.label_format != "nifti":
            import_highdicom()

    @property
    def also(self) -> tuple[Literal["entropy", "probabilities"], ...]:
        """Further outputs that the predictor must compute."""
        return (*(("entropy",) if self.uncertainty else ()), *(("probabilities",) if self.probabilities else ()))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the files depend on, in addition to the networks; empty for plain label maps."""
        steps = [] if self.postprocessing is None else self.postprocessing.steps
        return {
            **({} if self.label_format == "nifti" else {"format": self.label_format}),
            **({"also": list(self.also)} if self.also else {}),
            **({"postprocessing": [[step.operation, list(step.values)] for step in steps]} if steps else {}),
        }

    def name_label_map(self, case: Case) -> Path:
        """Return the file of a case's label map."""
        return self.folder / f"{case['case']}{SUFFIXES[self.label_format]}"

    @property
    def stage_folder(self) -> Path:
        """Folder for the label maps of the previous stage of a cascade."""
        return self.folder / "previous_stage"

    def name_stage(self, case: Case) -> Path:
        """Return the file of a case's label map of the previous stage."""
        return self.stage_folder / f"{case['case']}.nii.gz"

    def name_all(self, case: Case) -> tuple[Path, ...]:
        """Return every file of a case, its label map last."""
        further = {"probabilities": self.probabilities, "uncertainty": self.uncertainty}
        names = [self.folder / name / f"{case['case']}.nii.gz" for name, asked in further.items() if asked]
        return (*names, self.name_label_map(case))

    def require_possible(self, case: Case) -> None:
        """Raise if the files of a case cannot be written, judged only by its paths.

        Raises
        ------
        ConfigError
            If a required package is not installed.
        DataError
            If a DICOM segmentation is requested for an image of another kind.
        """
        if self.label_format != "nifti":
            require_dicom_source(case["image"], case["case"])

    def write(
        self, given: Case, prepared: Mapping[str, Any], prediction: Prediction, trained: Trained
    ) -> tuple[Path, dict[str, float]]:
        """Write the files of a case, its label map last; return the label map's path, and its labels' volumes (ml).

        Parameters
        ----------
        given : Case
            The case with paths.
        prepared : Case
            The case with the preprocessed image; all files are on its original grid.
        prediction : Prediction
            The prediction, with the outputs of `also`.
        trained : Trained
            The trained networks.
        """
        image, name = prepared["image"], f"{given['case']}.nii.gz"
        if self.probabilities:
            assert prediction.probabilities is not None
            write_probabilities(
                prediction.probabilities, image, self.folder / "probabilities" / name, task=trained.task
            )
        if self.uncertainty:
            assert prediction.entropy is not None
            write_entropy(prediction.entropy, image, self.folder / "uncertainty" / name)
        labels = prediction.labels if self.postprocessing is None else self.postprocessing(prediction.labels)
        path, task = self.name_label_map(given), trained.task
        if self.label_format == "nifti":
            write_prediction(labels, image, path, task.value_names)
        else:
            series = list_files(given["image"])[0]
            kind: Literal["SEG", "RTSTRUCT"] = "SEG" if self.label_format == "dicom-seg" else "RTSTRUCT"
            write_dicom_segmentation(labels, image, path, task=task, series=series, weights=trained.weights, kind=kind)
        return path, measure_volumes(labels, task)


# Report the results of the cases of a prediction, for people and for programs.


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Result of one case."""

    case: str
    state: Literal["predicted", "there before", "failed"]
    file: Path | None = None
    """The label map; None if the case failed."""
    error: str = ""
    """Class of the error."""
    message: str = ""
    """Message of the error, with its remedy."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """See `volseg.inference.prefetching.CaseOutcome`; empty for a case that was there before."""
    remarks: tuple[Remark, ...] = ()
    """Remarks on the image, to check."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Results of all cases, in the order of the input."""

    folder: Path
    cases: tuple[CaseResult, ...]

    @property
    def label_maps(self) -> dict[str, Path]:
        """Case id to the file of its label map, new or existing."""
        return {case.case: case.file for case in self.cases if case.file is not None}

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases without a label map."""
        return tuple(case for case in self.cases if case.file is None)

    def require_all(self) -> dict[str, Path]:
        """Return `label_maps`, if every case has one.

        Raises
        ------
        DataError
            If cases failed; names each of them with the reason.
        """
        if self.failures:
            lines = "\n".join(f"  {case.case}: {case.message}" for case in self.failures)
            raise DataError(f"{len(self.failures)} case(s) cannot be used:\n{lines}\nfix them, or leave them out")
        return self.label_maps

    def table(self) -> str:
        """Return a table with a line per case, and their counts."""
        rows = [
            (
                case.case,
                case.state,
                f"{sum(case.seconds.values()):.1f}" if case.seconds else "",
                str(case.file or f"{case.error}: {case.message}"),
            )
            for case in self.cases
        ]
        table = format_table([("case", "result", "seconds", "label map or error"), *rows])
        told = ", ".join(f"{count} {state}" for state, count in self._count().items() if count)
        return f"{table}\n\n{len(self.cases)} case(s) in {self.folder}: {told}"

    def as_json(self) -> dict[str, Any]:
        """Return all results as plain values for JSON."""
        cases = [to_jsonable_python(case) for case in self.cases]
        return {"folder": str(self.folder), "counts": self._count(), "cases": cases}

    def _count(self) -> dict[str, int]:
        states = ("predicted", "there before", "failed")
        return {state: sum(case.state == state for case in self.cases) for state in states}


VOLUMES = "volumes.csv"


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
        self._made_by = {
            "checkpoint": checkpoint,
            "weights": trained.weights,
            "network": trained.config.network.model_dump(mode="json"),
            **trained.settings,
            **files.settings,
            **({"components": own} if (own := describe_components(trained.config)) else {}),
        }
        self.digest = blake2b(json.dumps(self._made_by, sort_keys=True).encode(), digest_size=8).hexdigest()

    def begin(self) -> None:
        """Describe this prediction, or continue the folder's record of predictions with the same settings.

        Other label maps in the folder no longer count as results. Old files of killed predictions are removed.
        """
        for pattern in (".*.partial", "*/.*.partial"):
            remove_partials(self._folder, pattern, time.time() - PARTIAL_SECONDS)
        lines = self._read()
        if lines and not self._list_changes(_parse(lines[0])):
            if not lines[-1].endswith("\n"):  # a line cut off by a kill must not corrupt the next one
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
                f"the predictions in {self._folder} were made with other settings ({', '.join(changed)} differ); name "
                "another folder with --output, or predict all images again with --overwrite instead of --resume"
            )
        known = {entry.get("case"): entry for entry in entries}
        done = {}
        for case in cases:
            entry, path = known.get(case["case"], {}), self._files.name_label_map(case)
            if entry.get("made_by") != self.digest:  # from another process that was writing when this one began
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
        entry = {"case": case["case"], "made_by": self.digest, "image": image, "label_map": digest}
        self._append(json.dumps({**entry, "ml": dict(volumes)}) + "\n")

    def write_volumes(self) -> Path:
        """Write ``volumes.csv``, the volume (ml) of each label in each predicted case; return its path."""
        own = [entry for entry in map(_parse, self._read()) if entry.get("made_by") == self.digest]
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
        self._append(json.dumps({"case": case["case"], "error": error, "message": message}) + "\n")

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
