"""Networks that come from elsewhere and go elsewhere: other tools' model folders, one file for a run, other formats.

`nnunet` reads what nnU-Net 2 trained; `archive` is a run in one file; `tracing` and `bundle` write what runs without
volseg. Nothing here builds a run's objects: `volseg.experiment` does, of what these modules read.
"""
