"""Find the faults that make cases unusable; describe each in one sentence, and report all bad cases at once.

A valid header does not imply valid voxels, so files are read fully. A training prepares the volumes that the check has
read (`volseg.data.case_store.preparing`), so that no file is decompressed twice. ``volseg data check`` uses the same
rules, and also compares the cases with each other.
"""
