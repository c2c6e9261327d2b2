"""Which files a prediction leaves for each case, and what is done to its label map before.

::

    FOLDER/CASE.nii.gz                  label map; CASE.dcm where DICOM segmentations are asked for
    FOLDER/probabilities/CASE.nii.gz    of every class or region
    FOLDER/uncertainty/CASE.nii.gz      entropy of the probabilities
    FOLDER/predicted.jsonl              what made them; see `volseg.experiment.prediction_record`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from volseg.config.nearest import did_you_mean
from volseg.data.cases import Case
from volseg.data.readers import list_files
from volseg.errors import ConfigError, DataError
from volseg.experiment.trained import Trained
from volseg.inference.dicom_segmentation import require_dicom_source, write_dicom_segmentation
from volseg.inference.fractions import require_room, write_entropy, write_probabilities
from volseg.inference.postprocessing import Postprocessing
from volseg.inference.prediction import Prediction
from volseg.inference.writing import write_prediction

__all__ = ["SUFFIXES", "PredictionFiles"]

SUFFIXES = {"nifti": ".nii.gz", "dicom-seg": ".dcm"}
"""Of label maps, by the format that is asked for."""

HELD = 3
"""Predictions in memory at once: computed, waiting, written."""


@dataclass(frozen=True, kw_only=True)
class PredictionFiles:
    """What is written for each case, and where.

    Raises
    ------
    ConfigError
        For a format that is not known.
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
        """What a predictor is asked for besides label maps."""
        return (*(("entropy",) if self.uncertainty else ()), *(("probabilities",) if self.probabilities else ()))

    @property
    def settings(self) -> dict[str, Any]:
        """What the files follow from, beside the networks: nothing where they are label maps as predicted."""
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

    def name_all(self, case: Case) -> tuple[Path, ...]:
        """Return every file of a case, its label map last."""
        further = {"probabilities": self.probabilities, "uncertainty": self.uncertainty}
        names = [self.folder / name / f"{case['case']}.nii.gz" for name, asked in further.items() if asked]
        return (*names, self.name_label_map(case))

    def require_possible(self, case: Case) -> None:
        """Raise where the files of a case cannot be written, by its paths alone.

        Raises
        ------
        ConfigError
            If a package is needed that is not installed.
        DataError
            If a DICOM segmentation is asked for of something else.
        """
        if self.label_format == "dicom-seg":
            image, *others = list_files(case["image"])
            if others:
                raise DataError(
                    f"case {case['case']}: a DICOM segmentation refers to one series, and the channels of this image "
                    f"are {1 + len(others)} files; leave out --format dicom-seg to have NIfTI"
                )
            require_dicom_source(image, case["case"])

    def require_room(self, prepared: Case, trained: Trained) -> None:
        """Raise where the probabilities of a prepared case would not fit into memory."""
        if self.probabilities:
            require_room(prepared["image"], trained.task.num_outputs, held=HELD)

    def write(self, given: Case, prepared: Mapping[str, Any], prediction: Prediction, trained: Trained) -> Path:
        """Write the files of a case, its label map last; return that one.

        Parameters
        ----------
        given : Case
            With paths.
        prepared : Case
            With the preprocessed image, on whose original grid everything is written.
        prediction : Prediction
            With what `also` asked for.
        trained : Trained
            What predicted.
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
        path = self.name_label_map(given)
        if self.label_format == "nifti":
            return write_prediction(labels, image, path)
        return write_dicom_segmentation(
            labels, image, path, task=trained.task, series=list_files(given["image"])[0], weights=trained.weights
        )
