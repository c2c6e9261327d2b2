"""Tags of the DICOM elements that volseg reads from a header, by their names in the standard."""

from collections.abc import Mapping

from volseg.data.dicom.elements import Tag

__all__ = ["BINARY", "GROUPS", "OVERLAY_BITS", "STATES", "TAGS", "UNITS", "WANTED"]


TAGS: Mapping[str, Tag] = {
    "ImageType": (0x0008, 0x0008),
    "FrameType": (0x0008, 0x9007),
    "SequenceName": (0x0018, 0x0024),
    "SliceThickness": (0x0018, 0x0050),
    "EchoTime": (0x0018, 0x0081),
    "InversionTime": (0x0018, 0x0082),
    "SpacingBetweenSlices": (0x0018, 0x0088),
    "TriggerTime": (0x0018, 0x1060),
    "ImagerPixelSpacing": (0x0018, 0x1164),
    "FlipAngle": (0x0018, 0x1314),
    "EffectiveEchoTime": (0x0018, 0x9082),
    "DiffusionBValue": (0x0018, 0x9087),
    "AcquisitionNumber": (0x0020, 0x0012),
    "ImagePositionPatient": (0x0020, 0x0032),
    "ImageOrientationPatient": (0x0020, 0x0037),
    "FrameOfReferenceUID": (0x0020, 0x0052),
    "TemporalPositionIdentifier": (0x0020, 0x0100),
    "StackID": (0x0020, 0x9056),
    "TemporalPositionIndex": (0x0020, 0x9128),
    "NominalCardiacTriggerDelayTime": (0x0020, 0x9153),
    "SamplesPerPixel": (0x0028, 0x0002),
    "PhotometricInterpretation": (0x0028, 0x0004),
    "NumberOfFrames": (0x0028, 0x0008),
    "Rows": (0x0028, 0x0010),
    "Columns": (0x0028, 0x0011),
    "PixelSpacing": (0x0028, 0x0030),
    "BitsAllocated": (0x0028, 0x0100),
    "BitsStored": (0x0028, 0x0101),
    "HighBit": (0x0028, 0x0102),
    "PixelRepresentation": (0x0028, 0x0103),
    "RescaleIntercept": (0x0028, 0x1052),
    "RescaleSlope": (0x0028, 0x1053),
    "RescaleType": (0x0028, 0x1054),
    "ModalityLUTSequence": (0x0028, 0x3000),
    "Units": (0x0054, 0x1001),
    "FrameReferenceTime": (0x0054, 0x1300),
    "SegmentationType": (0x0062, 0x0001),
    "GridFrameOffsetVector": (0x3004, 0x000C),
    "DoseGridScaling": (0x3004, 0x000E),
    "SharedFunctionalGroupsSequence": (0x5200, 0x9229),
    "PerFrameFunctionalGroupsSequence": (0x5200, 0x9230),
}

GROUPS: Mapping[str, Tag] = {
    "ImagePositionPatient": (0x0020, 0x9113),
    "ImageOrientationPatient": (0x0020, 0x9116),
    **dict.fromkeys(("PixelSpacing", "SpacingBetweenSlices", "SliceThickness"), (0x0028, 0x9110)),
    **dict.fromkeys(("RescaleIntercept", "RescaleSlope", "RescaleType"), (0x0028, 0x9145)),
    **dict.fromkeys(("TemporalPositionIndex", "StackID"), (0x0020, 0x9111)),
    "DiffusionBValue": (0x0018, 0x9117),
    "EffectiveEchoTime": (0x0018, 0x9114),
    "NominalCardiacTriggerDelayTime": (0x0018, 0x9118),
    "FrameType": (0x0018, 0x9226),
}
"""The functional group, a sequence, of each element in an enhanced file."""

STATES = (
    "TemporalPositionIdentifier",
    "TemporalPositionIndex",
    "TriggerTime",
    "NominalCardiacTriggerDelayTime",
    "DiffusionBValue",
    "EchoTime",
    "EffectiveEchoTime",
    "InversionTime",
    "FlipAngle",
    "SequenceName",
    "StackID",
    "FrameReferenceTime",
    "AcquisitionNumber",
    "ImageType",
    "FrameType",
)
"""Elements that distinguish images at one place: time, diffusion weighting, echo, kind of image."""

BINARY = {"TemporalPositionIndex", "DiffusionBValue", "EffectiveEchoTime", "NominalCardiacTriggerDelayTime"}
"""The elements of `STATES` that are binary numbers."""

UNITS = ("FrameOfReferenceUID", "Units", "RescaleType")
"""Elements that define the meaning of positions and values; a volume has one value of each."""

OVERLAY_BITS = [(group, 0x0102) for group in range(0x6000, 0x6020, 2)]
"""Tags of the voxel bit of an overlay; 0 if the overlay has separate data."""

WANTED = frozenset({*TAGS.values(), *GROUPS.values(), *OVERLAY_BITS})
"""Every element that is read from a header."""
