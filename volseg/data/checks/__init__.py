"""Find the faults that make a case unusable, each in one sentence, and all bad cases at once.

A header can be right while the voxels are not, so files are read fully. A training prepares the volumes that the check
has read (`volseg.data.case_store.preparing`), so that no file is decompressed twice. ``volseg data check`` uses the
same rules, and also compares the cases with each other.
"""
