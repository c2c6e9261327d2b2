"""Label maps of whole volumes of probabilities, in one step."""

import torch
from monai.data import MetaTensor

from volseg.inference.original_grid import Decision, Held, LabelRule, WayBack, require_on
from volseg.inference.sampling import sample_grid
from volseg.transforms.grid import Grid


def decide_all(decision: Decision, probabilities: torch.Tensor, source: Grid) -> torch.Tensor:
    require_on(probabilities, source)
    decision.take(Held(probabilities), tuple(map(range, source.shape)))
    return decision.labels[None]


def original_label_map(probabilities: torch.Tensor, image: MetaTensor, *, values=None, regions=False) -> MetaTensor:
    """Return the label map on the grid that a preprocessed image had in its file."""
    back = WayBack.of(image)
    inner = probabilities[:, *(slice(at, at + side) for at, side in zip(back.start, back.source.shape, strict=True))]
    return back.label(decide_all(back.begin(LabelRule.of(len(inner), values, regions)), inner, back.source))


def label_map_on(target: Grid, probabilities: torch.Tensor, source: Grid, *, values=None, regions=False):
    """Return the label map on ``target`` of probabilities on ``source``."""
    rule = LabelRule.of(len(probabilities), values, regions)
    return decide_all(Decision(sample_grid(target, source), target.shape, rule), probabilities, source)
