"""Import and export networks: model folders of other tools, runs as one file, and formats for other programs.

`nnunet` reads models of nnU-Net 2; `archive` packs a run into one file; `bundle` and `traced` write formats that run
without volseg (TorchScript, ONNX, MONAI bundles). `volseg.experiment` builds the objects of a run.
"""
