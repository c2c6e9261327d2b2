"""A batch of windows through the models: every model, every mirroring, and the mean of their probabilities."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from volseg.errors import GridError
from volseg.parallel.processes.progress import report_progress

__all__ = ["Model", "WindowStep", "full_logits"]

Model = Callable[[Tensor], Any]
"""``(B, C, D, H, W)`` to logits ``(B, K, D, H, W)``; see `full_logits` for what else may come back."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowStep:
    """Models, and the mirrorings in which they see a batch of windows.

    Parameters
    ----------
    models : sequence of callables
        Each maps windows ``(B, C, d, h, w)`` to logits ``(B, K, d, h, w)``. Already in evaluation mode.
    num_classes : int
        K: classes, with the background, or regions.
    regions : bool
        Whether the K have a sigmoid each, instead of a softmax that they share.
    mirror_axes : sequence of int
        Axes of which every subset is mirrored in turn; 0, 1, 2 are d, h, w.
    autocast : torch.dtype, optional
        For the models; what follows them is float32.
    before_pass : callable, optional
        Called before each pass through a model; it may raise to leave.
    samples_per_pass : int
        Most that go through a model together where windows are mirrored: so many of their mirrorings, one at least.
    """

    models: Sequence[Model]
    num_classes: int
    regions: bool = False
    mirror_axes: Sequence[int] = ()
    autocast: torch.dtype | None = None
    before_pass: Callable[[], object] | None = None
    samples_per_pass: int = 1

    @property
    def link(self) -> str:
        """What makes a pass's logits what is blended: ``softmax``, ``sigmoid``, or nothing."""
        return "sigmoid" if self.regions else "softmax"

    @property
    def num_passes(self) -> int:
        """How often each window goes through a model."""
        return len(self.models) * 2 ** len(self.mirror_axes)

    def __call__(self, windows: Tensor) -> Tensor:
        """Return the mean over all passes of the softmax, or of the sigmoids: ``(B, K, d, h, w)`` float32."""
        total: Tensor | None = None
        for logits, dims in self.passes(windows):
            one = logits.float().sigmoid() if self.regions else logits.float().softmax(1)
            one = one.flip(dims) if dims else one
            total = one if total is None else total.add_(one)
        assert total is not None
        return total.div_(self.num_passes)

    def passes(self, windows: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the logits ``(B, K, d, h, w)`` of each pass, as mirrored as the windows were, and the mirrored dims.

        Raises
        ------
        GridError
            If a model returns something else.
        """
        axes = self.mirror_axes
        mirrorings = [flips for count in range(len(axes) + 1) for flips in combinations(axes, count)]
        dims = [[axis - 3 for axis in flips] for flips in mirrorings]
        together = max(1, self.samples_per_pass // len(windows))
        for model in self.models:
            for first in range(0, len(dims), together):
                report_progress("predict")
                if self.before_pass is not None:
                    self.before_pass()
                own = dims[first : first + together]
                mirrored = [windows.flip(each) if each else windows for each in own]
                given = mirrored[0] if len(mirrored) == 1 else torch.cat(mirrored)
                with torch.autocast(windows.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                    logits = full_logits(model(given))
                self._check(logits, given)
                yield from zip(logits.split(len(windows)), own, strict=True)

    def _check(self, logits: Tensor, windows: Tensor) -> None:
        wanted = (windows.shape[0], self.num_classes, *windows.shape[2:])
        if tuple(logits.shape) != wanted:
            raise GridError(
                f"the model must return logits (B, K, D, H, W) = {wanted} with one channel per "
                f"{'region' if self.regions else 'class, background included'}, got {tuple(logits.shape)}"
            )


def full_logits(output: Any) -> Tensor:
    """Return the logits at full resolution and in one piece.

    A list or tuple is deep supervision, full resolution first; a volume sharded over devices is gathered by its
    ``full_tensor`` (a collective: every process of the group must predict).
    """
    if isinstance(output, list | tuple):
        output = output[0]
    if hasattr(output, "full_tensor"):
        output = output.full_tensor()
    if not isinstance(output, Tensor):
        raise GridError(f"the model must return logits as a tensor, got {type(output).__name__}")
    return output
