"""Networks that come from elsewhere and go elsewhere: other tools' model folders, one file for a run, other formats.

`nnunet` reads what nnU-Net 2 trained; `archive` is a run in one file; `bundle` writes what runs without volseg
(TorchScript, ONNX, MONAI bundles). Nothing here builds the objects of a run: `volseg.experiment` does.
"""
