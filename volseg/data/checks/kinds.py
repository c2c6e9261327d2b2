"""The kinds of faults of a data set: one table, which the checks and the command line read.

A kind's name is stable: programs may look for it in the JSON of ``volseg data check``. ``bad`` is a fault that no
training can accept; ``look`` may be intended, but should be checked. ``docs/data-check.md`` says when a kind is
reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from volseg.data.cases import Case
from volseg.data.readers import list_files

Severity = Literal["bad", "look"]


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of fault."""

    severity: Severity
    says: str
    """Description, in the same words for each case."""
    remedy: str
    repaired: str = ""
    """Repair by ``--fix``; empty if a repair would be a guess."""


_bad, _look = partial(FindingKind, "bad"), partial(FindingKind, "look")

KINDS: Mapping[str, FindingKind] = {
    "missing-file": _bad("a file is not there", "fetch it, or correct the path"),
    "truncated": _bad("a file ends early or is damaged", "fetch or export it again"),
    "unreadable": _bad("a file cannot be read as a volume", "convert it, or export it again"),
    "no-memory": _bad("a volume needs more memory than there is", "crop or resample it, or check on a larger machine"),
    "size": _bad("voxels of no patient's size", "correct the spacing in the header, or its unit"),
    "channels": _bad("another number of channels than the task's", "correct the file, or what the task declares"),
    "not-finite": _bad("NaN or infinite voxels", "replace them, for instance by the value of air"),
    "huge-values": _look("voxels beyond the range of any scanner", "replace them, for example by the value of air"),
    "constant": _bad("an image without content", "export the image again"),
    "label-channels": _bad("a label map of several channels", "write one number per structure into one channel"),
    "label-fractions": _bad(
        "label values that are not integers",
        "export it again with nearest neighbours",
        "rounded, if every voxel is within 0.001 of a value that is declared",
    ),
    "label-undeclared": _bad("label values that nobody declared", "correct the label map or declare the value"),
    "image-is-label": _bad("image and label are the same", "name the image's own file"),
    "swapped": _bad("image and label are swapped", "name them the other way round"),
    "shape": _bad("image and label differ in shape", "resample the label"),
    "label-coarser": _bad(
        "the label lies on a coarser or finer grid", "resample it onto the image's grid with nearest neighbours"
    ),
    "affine": _bad(
        "image and label lie in different places",
        "copy the image's affine if the voxels correspond, else resample",
        "the image's affine, if the shapes agree and the label is 0.25 voxel away at most, or has no place at all",
    ),
    "label-reordered": _bad(
        "the label covers the image's place with its axes in another order",
        "reorder the label's voxels with its affine; copying the image's affine would turn or mirror the label",
        "reordered without loss",
    ),
    "leak": _bad(
        "the same image trains and validates",
        "keep one of them, or both on one side of the split",
        "only the first is kept, if the labels are equal too",
    ),
    "patient-cut": _look(
        "a patient is in training and in validation",
        "the validation Dice will be too high; make another split unless these folds are published",
    ),
    "patients": _look(
        "several cases belong to one patient",
        "volseg configure writes split.group, which keeps them together; set it in your own configs",
    ),
    "patients-possible": _look(
        "several cases may belong to one patient", "set split.group if they do; --group none declares that they do not"
    ),
    "label-empty": _look(
        "the label holds background only", "a healthy control may be so; label the structures otherwise"
    ),
    "label-not-looked-for": _look(
        "the label holds values that were not looked for in this case",
        "add them to the list, or take them out of the label map",
    ),
    "image-like-label": _look("the image looks like a label map", "is it a label map?"),
    "same-channels": _look("two channels hold the same voxels", "was one file taken for both?"),
    "single-slice": _look("the volume is a single slice", "is a volume missing?"),
    "unplaced": _look(
        "the file has neither sform nor qform", "it is placed only by its spacing: orientation and side are a guess"
    ),
    "mirrored": _look(
        "sform and qform mirror each other (left-right)",
        "one of them swaps the sides, and the sform is taken",
        "the qform is made the sform's, or switched off where it cannot be",
    ),
    "forms-disagree": _look(
        "sform and qform disagree",
        "the sform is taken, other programs may go by the qform",
        "the qform is made the sform's, or switched off where it cannot be",
    ),
    "same-image": _look(
        "the same image stands under several names", "keep one, or it counts more than others and may be tested on"
    ),
    "trains-and-tests": _look("a test image trains as well", "take one of them out"),
    "same-label": _look("the same label map stands beside different images", "one of them belongs to another case"),
    "image-copy": _look(
        "the image is a cropped, mirrored or rescaled copy of another case's image",
        "keep one; otherwise it counts twice, and may be in training and test",
    ),
    "label-full": _look(
        "the label covers the whole volume", "is the background labelled, or the image cropped to the structure?"
    ),
    "label-volume": _look(
        "the labelled volume is far from the other cases'",
        "is the label complete, of the right structure, and the spacing right? the patient may be unusual",
    ),
    "label-absent": _look(
        "a label that nearly all cases have is missing",
        "was it merged into another label, or forgotten? it may be absent after surgery",
    ),
    "label-ragged": _look(
        "the label is as ragged as noise",
        "is it the right file, stored as integers? many small structures look like this too",
    ),
    "label-scattered": _look(
        "labelled voxels lie far from the largest connected part",
        "remove stray voxels, unless they are a second structure",
    ),
    "label-cut": _look(
        "the label reaches the faces of the volume",
        "is the volume cut off, or the label shifted? the field of view may be smaller",
    ),
    "label-shifted": _look(
        "the label is probably shifted against the image", "view both together; the patient may be unusual"
    ),
    "label-mirrored": _look(
        "the label is probably mirrored against the image", "view both together; the patient may be unusual"
    ),
    "labels-exchanged": _look(
        "the labels of two cases are probably exchanged", "view both cases, and exchange the files if so"
    ),
    "label-missing": _look(
        "a declared label is in no case", "declare what is there, or look for the cases that have it"
    ),
    "label-rare": _look("a declared label is in few cases", "some folds train or validate without it"),
    "orientation": _look(
        "voxel axes point elsewhere than in most cases",
        "preprocessing needs Orientation, as our configs have it; is left right?",
    ),
    "spacing": _look(
        "a spacing far from the other cases'", "is it in mm? leave the case out if it is another protocol"
    ),
    "extent": _look("a size (mm) far from the other cases'", "is it cut off, or of another body region?"),
    "intensity-scale": _look(
        "intensities of another scale than the other cases'",
        "export it as the others, or normalise each case by itself (ZScore)",
    ),
    "noise": _look(
        "the image is noisier than the other cases' images",
        "noise, swapped bytes and integer overflows look like this; another protocol may too",
    ),
    "slices-unlike": _look(
        "neighbouring slices differ more than those of other cases",
        "are slices missing, or is the spacing wrong? thicker slices look like this too",
    ),
    "wrapped": _look(
        "intensities jump as after an integer overflow", "export it in a type that holds its values, such as float32"
    ),
    "saturated": _look(
        "many voxels have the highest value", "export it with all its values; padding and masks look like this too"
    ),
    "empty-slices": _look("slices hold a single value", "are slices missing? padding looks like this too"),
    "intensity-mixed": _look(
        "the cases' intensities differ by orders of magnitude", "normalise each case by itself (ZScore)"
    ),
    "ct-offset": _look(
        "a CT without values below zero, as stored with 1024 added", "subtract 1024 (apply the rescale intercept)"
    ),
    "ct-clipped": _look("a CT whose values were cut off", "export it with all its values"),
    "contrast": _look(
        "the largest structure is dark where it is bright in the other cases, or the reverse",
        "is the image inverted, of another sequence, or the label displaced?",
    ),
    "label-on-air": _look("the label lies on air", "is it shifted or mirrored against the image?"),
}
"""Every kind of finding, by its name; the order is that of the docs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding in a case, its file, and its remedy."""

    case: str
    """Id of the case; empty for the data set as a whole."""
    file: Path | None
    message: str
    """A sentence with its remedy if bad; otherwise the detail to look at."""
    kind: str = "unreadable"
    """A key of `KINDS`."""

    @classmethod
    def of(cls, case: Case, kind: str, message: str, field: str = "image") -> "Finding":
        """Return a finding about the first file of a case's ``field``."""
        return cls(case["case"], list_files(case[field])[0], message, kind)

    def __str__(self) -> str:
        return f"{self.case}: {self.message}"

    @property
    def severity(self) -> Severity:
        """Severity of the finding's kind."""
        return KINDS[self.kind].severity

    def as_dict(self) -> dict[str, str | None]:
        """Return the finding for the JSON of a check."""
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


Problem = Finding
"""A finding that makes a case bad."""

Remark = Finding
"""A finding to look at."""
