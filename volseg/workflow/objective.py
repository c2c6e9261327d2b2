"""Several losses, one number to minimise."""

from collections.abc import Mapping, Sequence
from typing import Any

from volseg.errors import ConfigError
from volseg.workflow.named import Named

__all__ = ["Objective"]


class Objective:
    """The weighted sum of named losses, as the field ``loss``.

    Parameters
    ----------
    losses : Named or sequence of Named
        Each gives one scalar. A single loss may be called ``loss``; among several that name is the sum's.
    weights : sequence of float, optional
        One factor per loss, 1 by default.
    """

    def __init__(self, losses: Named | Sequence[Named], weights: Sequence[float] | None = None) -> None:
        self.losses = [losses] if isinstance(losses, Named) else list(losses)
        self.weights = [1.0] * len(self.losses) if weights is None else list(weights)
        if not self.losses or len(self.losses) != len(self.weights):
            raise ConfigError(
                f"need one weight per loss and a loss at least, got {len(self.losses)} losses, {weights=}"
            )
        parts = [name for loss in self.losses for name in loss.outputs]
        is_alone = parts == ["loss"] and self.weights == [1.0]
        if len(set(parts)) != len(parts) or ("loss" in parts and not is_alone):
            raise ConfigError(
                f"losses need different names, and 'loss' names their weighted sum; got {parts} with {weights=}; "
                "name each one's output, such as output: dice"
            )
        self.names = ("loss",) if is_alone else (*parts, "loss")

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``fields`` with every loss and their weighted sum ``loss`` added."""
        fields = dict(fields)
        for loss in self.losses:
            fields.update(loss(fields))
        if self.names != ("loss",):
            fields["loss"] = sum(
                weight * fields[name]
                for weight, loss in zip(self.weights, self.losses, strict=True)
                for name in loss.outputs
            )
        return fields
