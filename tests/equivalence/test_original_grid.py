"""Our way back to the grid of the file against MONAI's Invertd, which replays its trace step by step."""

import torch
from monai.data import MetaTensor
from monai.transforms import Invertd

from volseg.inference.original_grid import resample
from volseg.transforms.grid import Grid
from volseg.transforms.preprocessing import build_preprocessing

ANTERIOR_SUPERIOR_LEFT = torch.tensor(
    [[0, 0, -2.0, 5], [1.5, 0, 0, 3], [0, 1, 0, -7], [0, 0, 0, 1]], dtype=torch.float64
)


def test_probabilities_come_back_as_by_monai():
    image = torch.rand(1, 10, 12, 14)
    image[:, :2] = 0
    preprocessing = build_preprocessing(
        [
            {"name": "Orientation"},
            {"name": "CropForeground"},
            {"name": "Spacing", "spacing": [1, 1.2, 0.8]},
            {"name": "Pad", "multiple": 8},
        ]
    )
    done = preprocessing({"case": "x", "image": MetaTensor(image, affine=ANTERIOR_SUPERIOR_LEFT)})
    probabilities = torch.rand(2, *done["image"].shape[1:])
    done["pred"] = MetaTensor(probabilities).copy_meta_from(done["image"])
    theirs = Invertd("pred", preprocessing, orig_keys="image", nearest_interp=False)(done)["pred"]
    padded = done["image"].meta["padding"]
    inner = tuple(
        slice(before, side - after) for (before, after), side in zip(padded, probabilities.shape[1:], strict=True)
    )
    unpadded = Grid.of(done["image"]).crop([box.start for box in inner], [box.stop - box.start for box in inner])
    ours = resample(Grid.original(done["image"]), probabilities[:, *inner], unpadded)

    assert ours.shape == theirs.shape == (2, 10, 12, 14)
    assert theirs.affine.allclose(ANTERIOR_SUPERIOR_LEFT)
    torch.testing.assert_close(ours, theirs.as_tensor(), atol=1e-5, rtol=0)  # float32 coordinates
    assert (ours[:, :2] == 0).all()  # cropped away
