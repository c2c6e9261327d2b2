"""Read nnU-Net 2's model folders: ``plans.json``, ``dataset.json``, ``fold_X/checkpoint_final.pth``.

Predictions equal nnU-Net's, voxel for voxel, so each module follows a part of nnU-Net: `plans` its plans and its
resampling, `folder` its folders and files of weights, `network` the names of its tensors, `predictor` its preprocessing
and its blending of windows. None of them imports nnU-Net.
"""

from volseg.exchange.nnunet.folder import NnunetModel, is_nnunet_model, read_nnunet

__all__ = ["NnunetModel", "is_nnunet_model", "read_nnunet"]
