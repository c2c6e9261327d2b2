"""The running statistics of a norm over the batch, and their update in a step."""

from dataclasses import dataclass

import torch
from torch import Tensor


def check_sizes(channels: int, **given: Tensor | None) -> None:
    """Refuse parameters and buffers of a norm whose size is not the number of channels, as torch does.

    Raises
    ------
    RuntimeError
        If a size differs; names the tensor.
    """
    for name, value in given.items():
        if value is not None and value.shape != (channels,):
            raise RuntimeError(f"{name} should hold {channels} values, one per channel, got {tuple(value.shape)}")


@dataclass(frozen=True, slots=True)
class Running:
    """A batch norm's buffers, ``(C,)``, and the momentum of their update."""

    mean: Tensor
    variance: Tensor
    momentum: float

    @classmethod
    def find(cls, mean: Tensor | None, variance: Tensor | None, momentum: float) -> "Running | None":
        """Return the buffers of a norm in training; None if it has none.

        Raises
        ------
        ValueError
            If the norm has only one of the two.
        """
        if (mean is None) != (variance is None):
            raise ValueError("running_mean and running_var must either both be None or neither be None")
        return None if mean is None or variance is None else cls(mean, variance, momentum)

    def fits_kernel(self) -> bool:
        """Return whether a kernel that counts in float32 updates the buffers as torch does."""
        return all(buffer.dtype == torch.float32 and buffer.is_contiguous() for buffer in (self.mean, self.variance))

    def update(self, mean: Tensor, variance: Tensor, count: int | Tensor) -> None:
        """Update the buffers.

        Parameters
        ----------
        mean, variance
            Statistics of the batch, ``(C,)``; the variance is biased.
        count
            Voxels of a channel, over all samples; a tensor if replicas share the batch. The running variance is
            unbiased: multiplied by ``count / (count - 1)``.
        """
        self.mean.lerp_(mean.to(self.mean), self.momentum)
        variance = variance.to(self.variance)
        self.variance.lerp_(variance, self.momentum)
        if isinstance(count, Tensor):
            self.variance.addcdiv_(variance, count - 1, value=self.momentum)
        else:
            self.variance.add_(variance, alpha=self.momentum / (count - 1))

    def shift(self, bias: Tensor) -> None:
        """Move the mean by what the samples lacked that it was moved to, ``(C,)``."""
        self.mean.add_(bias.to(self.mean.device), alpha=self.momentum)
