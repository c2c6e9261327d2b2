"""Read nnU-Net 2's model folders: ``plans.json``, ``dataset.json``, ``fold_X/checkpoint_final.pth``.

Predictions equal nnU-Net's, voxel for voxel, so each module here follows one of its parts: `plans` its plans and its
resampling, `folder` its folders and files of weights, `network` the names of its tensors, `predictor` what it does to
an image and how it blends windows. None of them imports nnU-Net.
"""

from volseg.exchange.nnunet.folder import NnunetModel, is_nnunet_model, read_nnunet

__all__ = ["NnunetModel", "is_nnunet_model", "read_nnunet"]
