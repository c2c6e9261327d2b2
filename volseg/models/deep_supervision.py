"""MONAI's DynUNet with its supervision heads as the deep supervision loss takes them."""

from monai.networks import nets
from torch import Tensor

__all__ = ["DynUNet"]


class DynUNet(nets.DynUNet):
    """Give ``[logits, coarser logits, ...]`` while training with deep supervision, and logits otherwise.

    MONAI's own ``forward`` resizes every head to the full grid and stacks them as (B, 1 + heads, K, D, H, W), for
    TorchScript's sake. `monai.losses.DeepSupervisionLoss` takes a list, finest first, and brings the label to each
    head's grid, so the heads stay as coarse as they are: less memory, and an eighth of the loss's work per level. The
    parameters and their names are MONAI's.
    """

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return logits (B, K, D, H, W), or the list of them, (B, K, D, H, W) / 2, / 4, ... after the first."""
        logits = self.output_block(self.skip_layers(x))
        if not (self.training and self.deep_supervision):
            return logits
        outputs = [logits, *self.heads]
        # The list belongs to the module: a head left in it would keep this step's graph alive until the next one.
        self.heads[:] = [None] * len(self.heads)
        return outputs
