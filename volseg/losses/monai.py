"""MONAI's Dice plus cross entropy, in one pass over the logits if its parameters allow."""

import monai.losses
from torch import Tensor

from volseg.errors import ConfigError
from volseg.losses.dice.reference import Terms
from volseg.losses.dice_cross_entropy import dice_cross_entropy
from volseg.losses.known_voxels import Targets, known_dice_cross_entropy


class DiceCELoss(monai.losses.DiceCELoss):
    """`monai.losses.DiceCELoss` with the same parameters, values and gradients, but no volumes except logits and label.

    One pass over logits and label replaces volumes of probabilities and of one-hot labels. It needs a softmax, a label
    map ``(B, 1, D, H, W)`` and the mean as reduction. MONAI's own code runs for class weights, label smoothing, a sum,
    one-hot labels, a single class, images, or another activation. The result is in float32 for logits in half
    precision.
    """

    targets: Targets | None = None
    """The meaning of a label map's numbers, if they are not just classes; see ``take_targets``."""

    def take_targets(self, targets: Targets) -> "DiceCELoss":
        """Restrict the loss to the known voxels from now on; see `volseg.losses.known_voxels`. Return self.

        With regions, each output has a sigmoid and binary cross entropy, even if ``softmax`` is set.

        Raises
        ------
        ConfigError
            For parameters that only MONAI's own code supports.
        """
        if not self.is_fused:
            raise ConfigError(
                "DiceCELoss on regions, ignored voxels or partially labelled cases supports no class weights, no label "
                "smoothing, no reduction except the mean, and no activation (it follows from the task); leave these out"
            )
        self.targets = None if targets.is_plain else targets
        return self

    @property
    def is_fused(self) -> bool:
        """Whether the parameters allow the single pass."""
        dice, entropy = self.dice, self.cross_entropy
        softmax = dice.softmax and dice.to_onehot_y and not dice.sigmoid and dice.other_act is None
        plain = entropy.weight is None and dice.class_weight is None and entropy.label_smoothing == 0
        return bool(softmax and plain and entropy.reduction == "mean")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002  (MONAI's name)
        """Return the scalar loss of logits ``(B, K, D, H, W)`` against a label map on the same grid."""
        if self.targets is not None:
            return self.of_head(input, target, 1.0)
        same_grid = input.ndim == target.ndim == 5 and input.shape[2:] == target.shape[2:]
        if self.is_fused and same_grid and input.shape[1] > 1 and target.shape[1] == 1:
            return self.of_head(input, target, 1.0)
        loss: Tensor = super().forward(input, target)
        return loss

    def of_head(self, logits: Tensor, label: Tensor, weight: float) -> Tensor:
        """Return ``weight`` times the loss of a supervision head; the label is read at the head's voxels."""
        dice = self.dice
        terms = Terms(
            dice=weight * self.lambda_dice,
            cross_entropy=weight * self.lambda_ce,
            include_background=dice.include_background,
            batch=dice.batch,
            squared=dice.squared_pred,
            jaccard=dice.jaccard,
            smooth_nr=dice.smooth_nr,
            smooth_dr=dice.smooth_dr,
        )
        if self.targets is not None:
            return known_dice_cross_entropy(logits, label, self.targets, terms)
        return dice_cross_entropy(logits, label, terms)
