"""The elements of DICOM that a volume is made from, named as in the standard (PS3.6), and where they may stand."""

from collections.abc import Mapping

from volseg.data.dicom_elements import Tag

__all__ = ["BINARY", "GROUPS", "NAMES", "OVERLAY_BITS", "STATES", "TAGS", "UNITS"]

IMAGE_TYPE, FRAME_OF_REFERENCE, FRAMES, ROWS, COLUMNS = (
    (0x0008, 0x0008),
    (0x0020, 0x0052),
    (0x0028, 0x0008),
    (0x0028, 0x0010),
    (0x0028, 0x0011),
)
SAMPLES, PHOTOMETRIC, ALLOCATED, STORED, HIGH_BIT, REPRESENTATION = (
    (0x0028, 0x0002),
    (0x0028, 0x0004),
    (0x0028, 0x0100),
    (0x0028, 0x0101),
    (0x0028, 0x0102),
    (0x0028, 0x0103),
)
POSITION, ORIENTATION, SPACING, DETECTOR_SPACING, STEP, THICKNESS = (
    (0x0020, 0x0032),
    (0x0020, 0x0037),
    (0x0028, 0x0030),
    (0x0018, 0x1164),
    (0x0018, 0x0088),
    (0x0018, 0x0050),
)
INTERCEPT, SLOPE, RESCALE_TYPE, SERIES_UNITS, MODALITY_LUT, SEGMENTATION = (
    (0x0028, 0x1052),
    (0x0028, 0x1053),
    (0x0028, 0x1054),
    (0x0054, 0x1001),
    (0x0028, 0x3000),
    (0x0062, 0x0001),
)
DOSE_SCALING, DOSE_OFFSETS, SHARED, PER_FRAME = (
    (0x3004, 0x000E),
    (0x3004, 0x000C),
    (0x5200, 0x9229),
    (0x5200, 0x9230),
)
TEMPORAL_INDEX, STACK, B_VALUE, EFFECTIVE_ECHO, TRIGGER_DELAY, FRAME_TYPE = (
    (0x0020, 0x9128),
    (0x0020, 0x9056),
    (0x0018, 0x9087),
    (0x0018, 0x9082),
    (0x0020, 0x9153),
    (0x0008, 0x9007),
)

GROUPS: Mapping[Tag, Tag] = {
    POSITION: (0x0020, 0x9113),
    ORIENTATION: (0x0020, 0x9116),
    SPACING: (0x0028, 0x9110),
    STEP: (0x0028, 0x9110),
    THICKNESS: (0x0028, 0x9110),
    INTERCEPT: (0x0028, 0x9145),
    SLOPE: (0x0028, 0x9145),
    RESCALE_TYPE: (0x0028, 0x9145),
    TEMPORAL_INDEX: (0x0020, 0x9111),
    STACK: (0x0020, 0x9111),
    B_VALUE: (0x0018, 0x9117),
    EFFECTIVE_ECHO: (0x0018, 0x9114),
    TRIGGER_DELAY: (0x0018, 0x9118),
    FRAME_TYPE: (0x0018, 0x9226),
}
"""The sequence of the functional groups in which an enhanced file keeps an element."""

STATES: Mapping[Tag, str] = {
    (0x0020, 0x0100): "TemporalPositionIdentifier",
    TEMPORAL_INDEX: "TemporalPositionIndex",
    (0x0018, 0x1060): "TriggerTime",
    TRIGGER_DELAY: "NominalCardiacTriggerDelayTime",
    B_VALUE: "DiffusionBValue",
    (0x0018, 0x0081): "EchoTime",
    EFFECTIVE_ECHO: "EffectiveEchoTime",
    (0x0018, 0x0082): "InversionTime",
    (0x0018, 0x1314): "FlipAngle",
    (0x0018, 0x0024): "SequenceName",
    STACK: "StackID",
    (0x0054, 0x1300): "FrameReferenceTime",
    (0x0020, 0x0012): "AcquisitionNumber",
    IMAGE_TYPE: "ImageType",
    FRAME_TYPE: "FrameType",
}
"""What tells images apart that lie at one place: time, diffusion weighting, echo, kind of image."""

BINARY = {TEMPORAL_INDEX, B_VALUE, EFFECTIVE_ECHO, TRIGGER_DELAY}
"""Those of them that are no text."""

UNITS: Mapping[Tag, str] = {
    FRAME_OF_REFERENCE: "FrameOfReferenceUID",
    SERIES_UNITS: "Units",
    RESCALE_TYPE: "RescaleType",
}
"""What gives positions and values their meaning; a volume has one of each."""

NAMES: Mapping[Tag, str] = {
    FRAMES: "NumberOfFrames",
    ROWS: "Rows",
    COLUMNS: "Columns",
    SAMPLES: "SamplesPerPixel",
    PHOTOMETRIC: "PhotometricInterpretation",
    ALLOCATED: "BitsAllocated",
    STORED: "BitsStored",
    HIGH_BIT: "HighBit",
    REPRESENTATION: "PixelRepresentation",
    POSITION: "ImagePositionPatient",
    ORIENTATION: "ImageOrientationPatient",
    SPACING: "PixelSpacing",
    DETECTOR_SPACING: "ImagerPixelSpacing",
    INTERCEPT: "RescaleIntercept",
    SLOPE: "RescaleSlope",
    MODALITY_LUT: "ModalityLUTSequence",
    SEGMENTATION: "SegmentationType",
    DOSE_SCALING: "DoseGridScaling",
    DOSE_OFFSETS: "GridFrameOffsetVector",
    SHARED: "SharedFunctionalGroupsSequence",
    PER_FRAME: "PerFrameFunctionalGroupsSequence",
}

OVERLAY_BITS = [(group, 0x0102) for group in range(0x6000, 0x6020, 2)]
"""Which bit of a voxel an overlay takes; 0 for one that has data of its own."""

TAGS = frozenset({*OVERLAY_BITS, *NAMES, *GROUPS, *GROUPS.values(), *STATES, *UNITS})
"""Every element that a header is read for."""
