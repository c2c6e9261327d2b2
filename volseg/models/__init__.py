"""Build segmentation networks by name, and find the volume sizes that each accepts."""
