"""SNOMED CT codes for what labels are called, as DICOM wants them beside a segment's name.

A name that is not here is no worse a label: its segment keeps the name, and is coded as tissue. On the right stand
pydicom's keywords for codes of its own SNOMED CT dictionary, so that no number is copied by hand.
"""

import re
from typing import NamedTuple

__all__ = ["CODES", "CodedName", "code_name"]


class CodedName(NamedTuple):
    """Keywords of SNOMED CT codes in ``pydicom.sr.codedict.codes.SCT``."""

    category: str
    kind: str
    side: str | None
    """``Left`` or ``Right``, where the name says so."""


ANATOMY, ABNORMAL, GENERIC = "AnatomicalStructure", "MorphologicallyAbnormalStructure", "Tissue"

CODES: dict[str, tuple[str, str]] = {
    **{
        name: (ANATOMY, keyword)
        for name, keyword in {
            "adrenal gland": "AdrenalGland",
            "aorta": "Aorta",
            "bladder": "Bladder",
            "brain": "Brain",
            "colon": "Colon",
            "duodenum": "Duodenum",
            "esophagus": "Esophagus",
            "gallbladder": "Gallbladder",
            "heart": "Heart",
            "hippocampus": "Hippocampus",
            "inferior vena cava": "InferiorVenaCava",
            "kidney": "Kidney",
            "left atrium": "LeftAtrium",
            "left ventricle": "LeftVentricle",
            "liver": "Liver",
            "lung": "Lung",
            "pancreas": "Pancreas",
            "prostate": "Prostate",
            "right atrium": "RightAtrium",
            "right ventricle": "RightVentricle",
            "spinal cord": "SpinalCord",
            "spleen": "Spleen",
            "stomach": "Stomach",
            "trachea": "Trachea",
            "urinary bladder": "Bladder",
            "vessel": "BloodVessel",
        }.items()
    },
    **{
        name: (ABNORMAL, keyword)
        for name, keyword in {
            "cancer": "Neoplasm",
            "edema": "Edema",
            "lesion": "Lesion",
            "necrosis": "Necrosis",
            "oedema": "Edema",
            "tumor": "Neoplasm",
            "tumour": "Neoplasm",
        }.items()
    },
}
"""Category and code of a name in lower case, words apart, without left and right."""


def code_name(name: str) -> CodedName:
    """Return the codes for a label's name, generic ones where it is not known.

    Examples
    --------
    >>> code_name("Kidney_left")
    CodedName(category='AnatomicalStructure', kind='Kidney', side='Left')
    >>> code_name("left atrium").side, code_name("zone 3").kind
    (None, 'Tissue')
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    sides = [word for word in words if word in ("left", "right")]
    without = [word for word in words if word not in sides]
    side = sides[0].capitalize() if len(sides) == 1 else None
    if (coded := CODES.get(" ".join(words))) is not None:
        return CodedName(*coded, side=None)  # the side is part of the structure's own name
    category, kind = CODES.get(" ".join(without), (GENERIC, GENERIC))
    return CodedName(category, kind, side)
