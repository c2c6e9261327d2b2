"""Table of the kinds of faults of a data set, for the checks and the command line.

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
    """Description of the fault, the same for each case."""
    remedy: str
    repaired: str = ""
    """Repair by ``--fix``; empty if a repair would be a guess."""


_bad, _look = partial(FindingKind, "bad"), partial(FindingKind, "look")

KINDS: Mapping[str, FindingKind] = {
    "missing-file": _bad("a file is missing", "fetch it, or correct the path"),
    "truncated": _bad("a file ends early or is damaged", "fetch or export it again"),
    "unreadable": _bad("a file cannot be read as a volume", "convert it, or export it again"),
    "no-memory": _bad("a volume needs more memory than is free", "crop or resample it, or check on a larger machine"),
    "size": _bad("voxel sides or an extent that no patient has", "correct the spacing in the header, or its unit"),
    "channels": _bad("the number of channels differs from the task's", "correct the file, or the channels of the task"),
    "not-finite": _bad("NaN or infinite voxels", "replace them, for instance with the value of air"),
    "huge-values": _look("voxels beyond the range of any scanner", "replace them, for example with the value of air"),
    "constant": _bad("a channel of the image is constant", "export the image again"),
    "label-channels": _bad("a label map with more than one channel", "write one number per structure into one channel"),
    "label-fractions": _bad(
        "label values that are not integers",
        "export it again with nearest-neighbour interpolation",
        "rounded, if every voxel is within 0.001 of a declared value",
    ),
    "label-undeclared": _bad("label values that are not declared", "correct the label map or declare the value"),
    "image-is-label": _bad("image and label are the same", "name two different files"),
    "swapped": _bad("image and label are swapped", "name them the other way round"),
    "shape": _bad("image and label differ in shape", "resample the label onto the image's grid"),
    "label-coarser": _bad(
        "the label has a coarser or finer grid",
        "resample it onto the image's grid with nearest-neighbour interpolation",
    ),
    "affine": _bad(
        "image and label are in different places",
        "copy the image's affine if the voxels correspond, else resample the label",
        "the image's affine is copied, if the shapes agree and the label is at most 0.25 voxel away, or has no place",
    ),
    "label-reordered": _bad(
        "the label's axes have another order or direction than the image's",
        "reorder the label's voxels by its affine; copying the image's affine would rotate or mirror the label",
        "reordered without loss",
    ),
    "leak": _bad(
        "the same image is in training and in validation",
        "keep one of them, or put both on the same side of the split",
        "only the first is kept, if the labels are equal too",
    ),
    "patient-cut": _look(
        "a patient is in training and in validation",
        "the validation Dice will be too high; use another split unless these folds are published",
    ),
    "patients": _look(
        "several cases belong to one patient",
        "volseg configure writes split.group, which keeps them together; set it in your own configs",
    ),
    "patients-possible": _look(
        "several cases may belong to one patient", "set split.group if they do; --group none declares that they do not"
    ),
    "label-empty": _look(
        "the label contains only background", "label the structures, unless this is a healthy control"
    ),
    "label-not-looked-for": _look(
        "the label contains values that the case's list of annotated labels lacks",
        "add them to 'labelled', or remove them from the label map",
    ),
    "image-like-label": _look("the image looks like a label map", "is the file really an image?"),
    "same-channels": _look("two channels contain the same voxels", "was one file used for both?"),
    "single-slice": _look("the volume is a single slice", "are the other slices missing?"),
    "unplaced": _look(
        "the file has neither sform nor qform", "only its spacing is known: orientation and side are guesses"
    ),
    "mirrored": _look(
        "sform and qform mirror each other (left-right)",
        "one of them swaps left and right; volseg uses the sform",
        "the qform is set to the sform, or switched off if it cannot express it",
    ),
    "forms-disagree": _look(
        "sform and qform disagree",
        "volseg uses the sform; other programs may use the qform",
        "the qform is set to the sform, or switched off if it cannot express it",
    ),
    "same-image": _look(
        "the same image has several names", "keep one; otherwise it counts twice, and may be in training and test"
    ),
    "trains-and-tests": _look("a test image is also in training", "remove one of them"),
    "same-label": _look("different images have the same label map", "name the right label map for each image"),
    "image-copy": _look(
        "the image is a cropped, mirrored or rescaled copy of another case's image",
        "keep one; otherwise it counts twice, and may be in training and test",
    ),
    "label-full": _look(
        "the label covers the whole volume", "is the background labelled, or the image cropped to the structure?"
    ),
    "label-volume": _look(
        "the labelled volume is far from the other cases'",
        "is the label complete, and are its structure and the spacing right? the patient may be unusual",
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
        "labelled voxels are far from the largest connected part",
        "remove stray voxels, unless they are a second structure",
    ),
    "label-cut": _look(
        "the label reaches the faces of the volume",
        "is the volume cut off, or the label shifted? the field of view may be smaller",
    ),
    "label-shifted": _look(
        "the label is probably shifted relative to the image", "view both together; the patient may be unusual"
    ),
    "label-mirrored": _look(
        "the label is probably mirrored relative to the image", "view both together; the patient may be unusual"
    ),
    "labels-exchanged": _look(
        "the labels of two cases are probably exchanged", "view both cases; if so, exchange the label files"
    ),
    "label-missing": _look(
        "no case has a declared label", "remove it from the declared labels, or add cases that have it"
    ),
    "label-rare": _look("few cases have a declared label", "some folds train or validate without it"),
    "orientation": _look(
        "the directions of voxel axes differ between cases",
        "preprocessing needs Orientation, as in planned configs; check left and right",
    ),
    "spacing": _look(
        "the spacing is far from the other cases'", "is it in mm? leave the case out if it has another protocol"
    ),
    "extent": _look("the size (mm) is far from the other cases'", "is the volume cut off, or of another body region?"),
    "intensity-scale": _look(
        "intensities on another scale than in the other cases",
        "export it like the others, or normalise each case separately (ZScore)",
    ),
    "noise": _look(
        "the image is noisier than the other cases' images",
        "noise, swapped bytes and integer overflows look like this; another protocol may too",
    ),
    "slices-unlike": _look(
        "neighbouring slices differ more than in other cases",
        "are slices missing, or is the spacing wrong? thicker slices look like this too",
    ),
    "wrapped": _look(
        "intensities jump as after an integer overflow", "export it in a type with a larger range, such as float32"
    ),
    "saturated": _look(
        "many voxels have the highest value", "export it without clipping; padding and masks look like this too"
    ),
    "empty-slices": _look("slices are constant", "are slices missing? padding looks like this too"),
    "intensity-mixed": _look(
        "the cases' intensities differ by orders of magnitude", "normalise each case separately (ZScore)"
    ),
    "ct-offset": _look(
        "a CT without negative values, probably stored with 1024 added", "subtract 1024 (apply the rescale intercept)"
    ),
    "ct-clipped": _look("a CT whose values were clipped", "export it without clipping"),
    "contrast": _look(
        "the largest structure is dark, but bright in the other cases, or the reverse",
        "is the image inverted or of another sequence, or is the label displaced?",
    ),
    "label-on-air": _look("the label is on air", "is it shifted or mirrored relative to the image?"),
}
"""Every kind of finding by its name, in the order of the docs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about a file of a case, or about the data set."""

    case: str
    """Id of the case; empty for the data set as a whole."""
    file: Path | None
    message: str
    """A sentence with its remedy if bad; otherwise the detail to check."""
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
"""A finding that may be intended, but should be checked."""
