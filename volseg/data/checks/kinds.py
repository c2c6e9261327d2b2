"""What can be wrong with a data set: one table of kinds, which the checks, the command line and the docs read.

A kind's name is stable: programs may look for it in the JSON of ``volseg data check``. ``bad`` is what no training can
mean; ``look`` is what may be meant and should be looked at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["KINDS", "Finding", "FindingKind", "Severity"]

Severity = Literal["bad", "look"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingKind:
    """One thing that can be wrong."""

    severity: Severity
    says: str
    """What it is, in the same words for each case."""
    rule: str
    """When it is said."""
    remedy: str
    mended: str = ""
    """What ``--fix`` does about it; empty where nothing can be done without guessing."""


def _bad(says: str, rule: str, remedy: str, mended: str = "") -> FindingKind:
    return FindingKind(severity="bad", says=says, rule=rule, remedy=remedy, mended=mended)


def _look(says: str, rule: str, remedy: str, mended: str = "") -> FindingKind:
    return FindingKind(severity="look", says=says, rule=rule, remedy=remedy, mended=mended)


KINDS: Mapping[str, FindingKind] = MappingProxyType(
    {
        "missing-file": _bad(
            "a file is not there", "every file that the task names exists", "fetch it, or mend the path"
        ),
        "truncated": _bad(
            "a file ends early or is damaged",
            "a file holds what its header claims, up to its checksum",
            "fetch or export it again",
        ),
        "unreadable": _bad(
            "a file cannot be read as a volume",
            "one of the formats; integers or floats on three axes; channels on one grid",
            "convert it, or export it again",
        ),
        "no-memory": _bad(
            "a volume needs more memory than there is",
            "the volume fits into the memory that is free",
            "crop or resample it, or check on a larger machine",
        ),
        "size": _bad(
            "voxels of no patient's size",
            "sides of 0.01 to 50 mm, less than 5 m along each axis",
            "mend the spacing in the header, or its unit",
        ),
        "channels": _bad(
            "another number of channels than the task's",
            "as many channels as the task declares; a time series has more",
            "mend the file, or what the task declares",
        ),
        "not-finite": _bad(
            "NaN or infinite voxels", "none, in image and label", "replace them, for instance by the value of air"
        ),
        "huge-values": _look(
            "values beyond any scanner's",
            "no value beyond 1e18, the square of which float32 cannot hold: means and losses become NaN",
            "replace them, for instance by the value of air",
        ),
        "constant": _bad("an image without content", "two values at least in every channel", "export the image again"),
        "label-channels": _bad(
            "a label map of several channels", "one channel", "write one number per structure into one channel"
        ),
        "label-fractions": _bad(
            "label values that are no integers",
            "integers; a float file of them is fine",
            "export it again with nearest neighbours",
            "rounded, if every voxel is within 0.001 of a value that is declared",
        ),
        "label-undeclared": _bad(
            "label values that nobody declared",
            "the values of the task's labels, and the one to ignore",
            "mend the label map or declare the value",
        ),
        "image-is-label": _bad(
            "image and label are the same", "image and label hold different voxels", "name the image's own file"
        ),
        "swapped": _bad(
            "image and label are swapped",
            "the image holds the values of labels alone, and the label does not",
            "name them the other way round",
        ),
        "shape": _bad(
            "image and label differ in shape", "the same number of voxels along each axis", "resample the label"
        ),
        "label-coarser": _bad(
            "the label lies on a coarser or finer grid",
            "another shape than the image's, but the same place and extent",
            "resample it onto the image's grid with nearest neighbours",
        ),
        "affine": _bad(
            "image and label lie in different places",
            "no corner voxel more than 0.1 voxel (shortest side) away",
            "copy the image's affine if the voxels correspond, else resample",
            "the image's affine, if the shapes agree and the label is 0.25 voxel away at most, or has no place at all",
        ),
        "label-reordered": _bad(
            "image and label lie in one place, their voxels in another axis order",
            "the image's order of axes, and its directions",
            "reorder the label's voxels with its affine; the image's affine for it would mirror it",
            "reordered, without loss",
        ),
        "leak": _bad(
            "the same image trains and validates",
            "no training image holds the voxels of one that validates in the same fold",
            "keep one of them, or both on one side of the split",
            "the first is kept alone, if the labels are equal too",
        ),
        "patient-cut": _look(
            "a patient trains and validates",
            "all cases of a patient on one side of each split that is given (a table's, or --split)",
            "the Dice of the validation is too good; make another split unless these folds are published",
        ),
        "patients": _look(
            "several cases are of one patient",
            "a patient for each case, by a column of patients, DICOM's PatientID, or the names of cases",
            "volseg configure writes split.group, which keeps them together; set it in a config of your own",
        ),
        "patients-possible": _look(
            "several cases may be of one patient",
            "names that do not count within a patient, such as ID_01 and ID_02 for many an ID",
            "set split.group if they are; --group none says that they are not",
        ),
        "label-empty": _look(
            "the label holds background only",
            "a value besides background and the one to ignore",
            "a healthy control may be so; label the structures otherwise",
        ),
        "label-not-looked-for": _look(
            "the label holds values that were not looked for in this case",
            "of a partially labelled case, only the values in its list",
            "add them to the list, or take them out of the label map",
        ),
        "image-like-label": _look(
            "the image holds nothing but values of labels",
            "more than the declared values; or more than 256 integers, or unlike neighbours, as images have",
            "is it a label map?",
        ),
        "same-channels": _look("two channels hold the same voxels", "channels differ", "was one file taken for both?"),
        "single-slice": _look("the volume is a single slice", "two voxels along each axis", "is a volume missing?"),
        "unplaced": _look(
            "the file has neither sform nor qform",
            "a place in the patient",
            "it is placed by its spacing alone: orientation and side are a guess",
        ),
        "mirrored": _look(
            "sform and qform mirror each other (left-right)",
            "both forms place the voxels alike, within 0.1 voxel",
            "one of them swaps the sides, and the sform is taken",
            "the qform is made the sform's, or switched off where it cannot be",
        ),
        "forms-disagree": _look(
            "sform and qform disagree",
            "both forms place the voxels alike, within 0.1 voxel",
            "the sform is taken, other programs may go by the qform",
            "the qform is made the sform's, or switched off where it cannot be",
        ),
        "same-image": _look(
            "the same image stands under several names",
            "every image once",
            "keep one, or it counts more than others and may be tested on",
        ),
        "trains-and-tests": _look(
            "a test image trains as well", "no test image holds the voxels of one that trains", "take one of them out"
        ),
        "same-label": _look(
            "the same label map stands beside different images",
            "every label map with 64 voxels or more of foreground once",
            "one of them belongs to another case",
        ),
        "image-copy": _look(
            "the image is a copy of another case's, cropped, mirrored or of another scale of intensities",
            "voxels that differ by a quarter of what neighbours do or more, in any mirroring, shift and scale",
            "keep one, or it counts more than others and may be tested on",
        ),
        "label-full": _look(
            "the label covers the whole volume",
            "at most 98 % of the voxels, where nine of ten cases stay below 90 %",
            "is the background labelled as well, or the image cropped to the structure?",
        ),
        "label-volume": _look(
            "the labelled volume (mm3) is far from the other cases'",
            "no less than a quarter, no more than 6 times the median, or within 5 robust deviations of the logarithms",
            "is the label finished, of this structure and of this spacing? a patient may be so",
        ),
        "label-absent": _look(
            "a label that nearly all cases hold is not in this one",
            "every label that 95 % of 20 or more cases hold",
            "was it merged into another value, or forgotten? after surgery it may be so",
        ),
        "label-ragged": _look(
            "the label is ragged, as noise is",
            "neighbours agree at most 12 points less than in the median case, or within 5 robust deviations",
            "is it the right file, and was it stored as integers? many small structures look alike",
        ),
        "label-scattered": _look(
            "labelled voxels lie far from the largest part",
            "at most 0.3 radii farther than in the median case, or within 5 robust deviations",
            "remove stray voxels; a second structure may be so",
        ),
        "label-cut": _look(
            "the label reaches the faces of the volume",
            "as little as in the other cases, within 3 % of its surface or 5 robust deviations",
            "is the volume cut off, or the label shifted? a smaller field of view may be so",
        ),
        "label-shifted": _look(
            "the label is shifted against the image",
            "the image along its border, and its place in the volume, are most like the other cases' where it lies",
            "look at both together; an unusual patient may be so",
        ),
        "label-mirrored": _look(
            "the label is mirrored against the image",
            "the image along its border, and its place in the volume, are most like the other cases' where it lies",
            "look at both together; an unusual patient may be so",
        ),
        "labels-exchanged": _look(
            "the labels of two cases are probably exchanged",
            "each label fits its own image better than the other's",
            "look at both cases; exchange the files if it is so",
        ),
        "label-missing": _look(
            "a declared label is in no case",
            "every declared value in some training case",
            "declare what is there, or look for the cases that have it",
        ),
        "label-rare": _look(
            "a declared label is in few cases",
            "in 5 cases at least, of 10 or more: one for each of five folds",
            "some folds train or validate without it",
        ),
        "orientation": _look(
            "voxel axes point elsewhere than in most cases",
            "the orientation of 80 % of the cases",
            "preprocessing needs Orientation, as our configs have it; is left right?",
        ),
        "spacing": _look(
            "a spacing far from the other cases'",
            "within a factor 3 of the median (1.5 where the size is far too), or three quartile ranges of the others",
            "is it in mm? leave the case out if it is another protocol",
        ),
        "extent": _look(
            "a size (mm) far from the other cases'",
            "within a factor 1.5 of the median, or of three quartile ranges",
            "is it cut off, or of another body region?",
        ),
        "intensity-scale": _look(
            "intensities of another scale than the other cases'",
            "a range (0.5 to 99.5 %) within a factor 10 of the median, or of three quartile ranges, and of some others",
            "export it as the others, or normalise each case by itself (ZScore)",
        ),
        "noise": _look(
            "the image is noisier than in the other cases",
            "neighbours correlate at most 0.15 less than in the median case, or within 5 robust deviations",
            "noise, swapped bytes and overflows look so; is it another protocol?",
        ),
        "slices-unlike": _look(
            "slices along one axis are less alike than in the other cases",
            "a roughness against the other axes within a factor 1.5 of the median case's, or 5 robust deviations",
            "were slices left out, or is the spacing wrong? thicker slices look so too",
        ),
        "wrapped": _look(
            "intensities jump between neighbours as after an overflow",
            "at most 0.5 points more jumps over 90 % of the range than in the median case, or 5 robust deviations",
            "export it in a type that holds its values, such as float32",
        ),
        "saturated": _look(
            "many voxels have the highest value",
            "at most 1 point more of them than in the median case, or within 5 robust deviations",
            "export it with all its values; a padded or masked image may be so",
        ),
        "empty-slices": _look(
            "slices hold a single value",
            "at most 10 points more of them than in the median case, or within 5 robust deviations",
            "are slices missing? a padded volume may be so",
        ),
        "intensity-mixed": _look(
            "the cases' intensities differ by orders of magnitude",
            "ranges within a factor 100 of each other, but for a tenth of the cases",
            "normalise each case by itself (ZScore)",
        ),
        "ct-offset": _look(
            "a CT without values below zero, as stored with 1024 added",
            "air below zero",
            "subtract 1024 (apply the rescale intercept)",
        ),
        "ct-clipped": _look(
            "a CT whose values were cut off",
            "fewer than 1 % of the voxels at a lowest value above -500",
            "export it with all its values",
        ),
        "contrast": _look(
            "the structures are darker than the rest where they are brighter in the other cases, or the reverse",
            "the sign of 90 % of the cases",
            "is the image inverted, of another sequence, or the label displaced?",
        ),
        "label-on-air": _look(
            "the label lies on air",
            "fewer than half of its voxels at the image's lowest value or, in CT, below -500, as in the other cases",
            "is it shifted or mirrored against the image?",
        ),
    }
)
"""Every kind of finding, by its name; the order is that of the docs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found in a case, where, and how to mend it."""

    case: str
    """Its id; empty for what concerns the data set as a whole."""
    file: Path | None
    message: str
    """A sentence with its remedy for what is bad; the detail for what is to be looked at."""
    kind: str = "unreadable"
    """A key of `KINDS`."""

    def __str__(self) -> str:
        return f"{self.case}: {self.message}"

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return KINDS[self.kind].severity

    def as_list(self) -> list[str | None]:
        """Return what `from_list` takes, as JSON can say it."""
        return [self.case, None if self.file is None else str(self.file), self.message, self.kind]

    @classmethod
    def from_list(cls, told: list[Any]) -> "Finding":
        """Return a finding that was told by `as_list`."""
        case, file, message, kind = told
        return cls(case, None if file is None else Path(file), message, kind)

    def as_dict(self) -> dict[str, str | None]:
        """Return what stands of it in the JSON of a check."""
        kind = KINDS[self.kind]
        said = self.message if kind.severity == "bad" else kind.says + (f": {self.message}" if self.message else "")
        return {
            "case": self.case,
            "file": None if self.file is None else str(self.file),
            "kind": self.kind,
            "severity": kind.severity,
            "message": said,
            "remedy": kind.remedy,
        }
