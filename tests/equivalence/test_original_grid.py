"""Our way back to the grid of the file against MONAI's Invertd, which replays MONAI's own chain step by step."""

import torch
from monai.data import MetaTensor
from monai.transforms import Compose, CropForegroundd, DivisiblePadd, Invertd, Orientationd, Spacingd

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
    chain = Compose(
        [
            Orientationd("image", axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S"))),
            CropForegroundd("image", source_key="image", select_fn=lambda volume: volume != 0),
            Spacingd("image", pixdim=[1, 1.2, 0.8], padding_mode="border"),
            DivisiblePadd("image", k=8),
        ]
    )
    same = chain({"image": MetaTensor(image, affine=ANTERIOR_SUPERIOR_LEFT)})
    assert same["image"].shape == done["image"].shape
    probabilities = torch.rand(2, *done["image"].shape[1:])
    same["pred"] = MetaTensor(probabilities).copy_meta_from(same["image"])
    theirs = Invertd("pred", chain, orig_keys="image", nearest_interp=False)(same)["pred"]
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
