"""Name and write the files of a prediction for each case, after postprocessing its label map.

::

    FOLDER/CASE.nii.gz                  label map; CASE.dcm for DICOM segmentations
    FOLDER/probabilities/CASE.nii.gz    of every class or region
    FOLDER/uncertainty/CASE.nii.gz      entropy of the probabilities
    FOLDER/previous_stage/CASE.nii.gz   label map of a cascade's first stage
    FOLDER/volumes.csv                  volume (ml) of each label
    FOLDER/predicted.jsonl              what made them; see `volseg.experiment.prediction.record`
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from volseg.config.nearest import did_you_mean
from volseg.data.cases import Case
from volseg.data.labels import measure_volumes
from volseg.data.readers import list_files
from volseg.errors import ConfigError, DataError
from volseg.experiment.prediction.trained import Trained
from volseg.inference.dicom_segmentation import require_dicom_source, write_dicom_segmentation
from volseg.inference.original_grid import Prediction
from volseg.inference.postprocessing import Postprocessing
from volseg.inference.writing import require_room, write_entropy, write_prediction, write_probabilities

SUFFIXES = {"nifti": ".nii.gz", "dicom-seg": ".dcm", "dicom-rtstruct": ".dcm"}
"""Suffixes of label maps, by format."""

HELD = 3
"""Predictions in memory at once: computed, waiting, written."""


@dataclass(frozen=True, kw_only=True)
class PredictionFiles:
    """Files to write for each case, and their names.

    Raises
    ------
    ConfigError
        For an unknown format.
    """

    folder: Path
    label_format: str = "nifti"
    probabilities: bool = False
    uncertainty: bool = False
    postprocessing: Postprocessing | None = None

    def __post_init__(self) -> None:
        if self.label_format not in SUFFIXES:
            raise ConfigError(
                f"no format of label maps is called {self.label_format!r}; {did_you_mean(self.label_format, SUFFIXES)}"
            )

    @property
    def also(self) -> tuple[Literal["entropy", "probabilities"], ...]:
        """Further outputs that the predictor must compute."""
        return (*(("entropy",) if self.uncertainty else ()), *(("probabilities",) if self.probabilities else ()))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the files depend on, beside the networks; empty for plain label maps."""
        asked = {"format": self.label_format, "also": list(self.also)}
        steps = [] if self.postprocessing is None else self.postprocessing.steps
        plain = {"format": "nifti", "also": []}
        return {
            **{name: value for name, value in asked.items() if value != plain[name]},
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
            image, *others = list_files(case["image"])
            if others:
                raise DataError(
                    f"case {case['case']}: a DICOM segmentation refers to one series, and the channels of this image "
                    f"are {1 + len(others)} files; leave out --format {self.label_format} to have NIfTI"
                )
            require_dicom_source(image, case["case"])

    def require_room(self, prepared: Case, trained: Trained) -> None:
        """Raise if the probabilities of a prepared case would not fit into memory."""
        if self.probabilities:
            require_room(prepared["image"], trained.task.num_outputs, held=HELD)

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


# What became of the cases of a prediction: for the eye, and for programs.


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
        names = ("case", "result", "seconds", "label map, or why there is none")
        widths = [max(len(row[column]) for row in [names, *rows]) for column in range(3)]
        head, *body = [
            f"| {name:<{widths[0]}} | {state:<{widths[1]}} | {seconds:>{widths[2]}} | {said} |"
            for name, state, seconds, said in [names, *rows]
        ]
        rule = "| " + " | ".join("-" * width for width in (*widths, len(names[3]))) + " |"
        told = ", ".join(f"{count} {state}" for state, count in self._count().items() if count)
        return "\n".join([head, rule, *body, "", f"{len(self.cases)} case(s) in {self.folder}: {told}"])

    def as_json(self) -> dict[str, Any]:
        """Return all results as plain values for JSON."""
        cases = [{**asdict(case), "file": case.file and str(case.file)} for case in self.cases]
        return {"folder": str(self.folder), "counts": self._count(), "cases": cases}

    def _count(self) -> dict[str, int]:
        states = ("predicted", "there before", "failed")
        return {state: sum(case.state == state for case in self.cases) for state in states}
