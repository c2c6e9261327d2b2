"""Label maps of whole volumes of probabilities, in one step."""

import torch
from monai.data import MetaTensor

from volseg.inference.original_grid import Decision, Held, LabelRule, require_on
from volseg.transforms.grid import Grid


def crop_padding(decision: Decision, volume: torch.Tensor) -> torch.Tensor:
    """Return a volume of the preprocessed image without the image's padding."""
    box = zip(decision.start, decision.source.shape, strict=True)
    return volume[:, *(slice(first, first + side) for first, side in box)]


def decide_all(decision: Decision, probabilities: torch.Tensor) -> MetaTensor:
    require_on(probabilities, decision.source)
    decision.take(Held(probabilities), tuple(map(range, decision.source.shape)))
    return decision.finish().labels


def original_label_map(probabilities: torch.Tensor, image: MetaTensor, *, values=None, regions=False) -> MetaTensor:
    """Return the label map on the grid that a preprocessed image had in its file."""
    decision = Decision(image, LabelRule.of(len(probabilities), values, regions))
    return decide_all(decision, crop_padding(decision, probabilities))


def label_map_on(target: Grid, probabilities: torch.Tensor, source: Grid, *, values=None, regions=False) -> MetaTensor:
    """Return the label map on ``target`` of probabilities on ``source``."""
    meta = {"original_affine": target.affine, "spatial_shape": target.shape}
    image = MetaTensor(torch.zeros(1, *source.shape), affine=source.affine, meta=meta)
    return decide_all(Decision(image, LabelRule.of(len(probabilities), values, regions)), probabilities)
