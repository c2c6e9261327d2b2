"""Read DICOM: series, enhanced images, segmentations and structure sets."""
