"""Compute running statistics of the whole batch from a batch that is normalised in micro-batches.

Batch norm in training normalises each micro-batch with its own mean and variance (waiting for the whole batch
at every layer would stall the pipeline). Its *running* statistics, which evaluation uses, are updated once per
batch with the statistics of the whole batch, as if it had not been cut: "deferred batch norm".

The statistics of a micro-batch need no extra pass over the activations: batch norm gets blank running buffers and a
momentum of one, so that it writes its batch statistics there.

References
----------
.. [1] C. Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020, arXiv:2004.09910,
   section 3.3 (deferred batch normalization).
.. [2] T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
   variances", 1979, equation 2.1.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from volseg.device.gpus import current_gpu_stream, is_gpu, keeping
from volseg.device.module_internals import NormBase
from volseg.device.torch_internals import lerp_each_
from volseg.errors import ParallelError

Norm = Callable[..., Tensor]


def list_batch_counters(net: nn.Module) -> frozenset[int]:
    """Return the identities of the ``num_batches_tracked`` buffers."""
    found = (m.num_batches_tracked for m in net.modules() if isinstance(m, NormBase))
    return frozenset(id(counter) for counter in found if counter is not None)


@dataclass(frozen=True, slots=True)
class NormSite:
    """A call of batch or instance norm that would update its running buffers."""

    running: tuple[Tensor, Tensor]
    momentum: float
    by_instance: bool
    device: torch.device
    """Device of the call; a borrowed layer's buffers are on another one."""
    call: Callable[[Tensor | None, Tensor | None, float], Tensor]
    """Call the norm with given running buffers and momentum."""


class FrozenStatistics:
    """Update no statistics: for measurements, and for recomputation in backward, whose batch was counted before.

    Parameters
    ----------
    counts_batches
        Whether counters increase nevertheless, for a caller that restores the buffers: norms with ``momentum=None``
        divide by their counter, which is 0 before the first batch.
    keeps_form
        Whether norms get blank running buffers, for a recomputation: torch's checkpoint counts saved tensors, and the
        forward pass saved such buffers too.
    """

    def __init__(self, counts_batches: bool = False, keeps_form: bool = False) -> None:
        self._counts_batches, self._keeps_form = counts_batches, keeps_form

    def norm(self, site: NormSite) -> Tensor:
        """Normalise with the batch's statistics and discard them."""
        if not self._keeps_form:
            return site.call(None, None, site.momentum)
        mean, variance = (torch.zeros_like(kept, device=site.device) for kept in site.running)
        return site.call(mean, variance, site.momentum)

    def counts_batch(self, counter: Tensor) -> bool:  # noqa: ARG002
        """Return whether the caller restores the counter."""
        return self._counts_batches


class _Gathered:
    """RunningStatistics of one norm call, one row per micro-batch."""

    def __init__(self, site: NormSite, rows: int) -> None:
        self.running, self.momentum, self.by_instance = site.running, site.momentum, site.by_instance
        mean = site.running[0]
        self.rows = torch.zeros(2, rows, len(mean), dtype=mean.dtype, device=site.device)
        # Zero for a micro-batch whose forward took another branch.
        self.counts = [0] * rows
        self._stream = current_gpu_stream(site.device) if is_gpu(site.device) else None
        self._blank = None if self._stream is None else self._stream.record_event()

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the blank mean and variance of a micro-batch, which may run on another stream than the first one."""
        if self._stream is not None and (stream := current_gpu_stream(self.rows.device)) != self._stream:
            stream.wait_event(self._blank)
        return self.rows[0, index], self.rows[1, index]


@keeping(64)
def _compute_weights(
    columns: tuple[tuple[tuple[int, ...], int], ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return each part's count ``(parts, C)`` and their totals ``(C,)``; cached, since copies from the host take time.

    ``columns`` are the counts of a norm call's parts, and its number of channels.
    """
    with torch.inference_mode(False):
        widths = torch.tensor([width for _, width in columns]).to(device)
        counts = torch.tensor([counts for counts, _ in columns], dtype=dtype).to(device)
        totals = torch.tensor([sum(counts) for counts, _ in columns], dtype=dtype).to(device)
        size = sum(width for _, width in columns)  # passed in, to avoid a synchronisation
        spread = counts.repeat_interleave(widths, 0, output_size=size).T.contiguous()
        return spread, totals.repeat_interleave(widths, output_size=size)


def combine(
    means: Tensor, variances: Tensor, counts: Tensor, totals: Tensor, by_instance: bool = False
) -> tuple[Tensor, Tensor]:
    """Merge means and unbiased variances of parts into those of the whole.

    Parameters
    ----------
    means, variances
        ``(parts, C)``.
    counts
        ``(parts, C)``: values per channel in each part; samples if ``by_instance``. A part of zero values is ignored.
    totals
        ``(C,)``: sum over the parts.
    by_instance
        Instance norm's running statistics are averages over samples: the spread between the parts is ignored.
    """
    mean = (means * counts).sum(0) / totals
    if by_instance:
        return mean, (variances * counts).sum(0) / totals
    within = (variances * (counts - 1).clamp_min_(0)).sum(0)
    between = ((means - mean).square() * counts).sum(0)
    return mean, (within + between) / (totals - 1)


def _commit(calls: Sequence[_Gathered]) -> None:
    """Update the running statistics of some norms of one device from all micro-batches.

    All norms are updated in one call: fifty norms would otherwise queue hundreds of tiny kernels before the loss.
    """
    first, widths = calls[0], [kept.rows.shape[2] for kept in calls]
    means, variances = torch.cat([kept.rows for kept in calls], 2)
    columns = tuple((tuple(kept.counts), width) for kept, width in zip(calls, widths, strict=True))
    whole = combine(
        means, variances, *_compute_weights(columns, means.dtype, means.device), by_instance=first.by_instance
    )
    for place, values in enumerate(whole):
        running = [kept.running[place] for kept in calls]
        new = [value.to(old.device) for value, old in zip(values.split(widths), running, strict=True)]
        lerp_each_(running, new, first.momentum)


class WholeBatchStatistics:
    """Gather each norm's statistics over the micro-batches of one batch; ``commit`` updates the running buffers.

    Parameters
    ----------
    micro_batches
        Number of micro-batches.
    counts_later
        Whether ``commit`` increases the counters too: a recording repeats no functions on them.
    """

    def __init__(self, micro_batches: int, counts_later: bool = False) -> None:
        self.micro_batches = micro_batches
        self.splits_batch_norm = False
        """Whether a batch norm used the statistics of one micro-batch of several."""
        self.gathered: dict[tuple[int, int], _Gathered] = {}
        self._counts_later = counts_later
        self._counters: list[Tensor] = []
        self._calls: dict[int, int] = defaultdict(int)
        self._index = 0

    def begin(self, index: int) -> None:
        """Continue with micro-batch ``index``."""
        self._index = index
        self._calls.clear()

    def counts_batch(self, counter: Tensor) -> bool:
        """Count the batch once, not its micro-batches."""
        if self._counts_later and self._index == 0:
            self._counters.append(counter)
        return self._index == 0 and not self._counts_later

    def norm(self, site: NormSite) -> Tensor:
        """Normalise with the micro-batch's statistics and keep them."""
        # A norm that is called twice per forward updates twice: calls are distinguished by their number.
        buffer = id(site.running[0])
        key = buffer, self._calls[buffer]
        self._calls[buffer] += 1
        if key not in self.gathered:
            self.gathered[key] = _Gathered(site, self.micro_batches)
        kept = self.gathered[key]
        # Blank buffers and a momentum of one: the norm leaves its batch statistics there.
        result = site.call(*kept.row(self._index), 1.0)
        kept.counts[self._index] = len(result) if site.by_instance else result.numel() // result.shape[1]
        return result

    @torch.no_grad()
    def commit(self) -> None:
        """Update every running buffer once per call of its norm, in the order of the calls; then count the batch."""
        groups: dict[tuple[Any, ...], list[_Gathered]] = defaultdict(list)
        for (_, call), kept in self.gathered.items():
            rows = kept.rows
            groups[call, rows.device, rows.dtype, kept.by_instance, kept.momentum].append(kept)
        for _, calls in sorted(groups.items(), key=lambda group: group[0][0]):
            _commit(calls)
        for counter in self._counters:
            counter.add_(1)


_PYTHON = ("input", "running_mean", "running_var", "weight", "bias")
_NATIVE = ("input", "weight", "bias", "running_mean", "running_var")
NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: (*_PYTHON, "training", "momentum", "eps"),
    F.instance_norm: (*_PYTHON, "use_input_stats", "momentum", "eps"),
    torch.batch_norm: (*_NATIVE, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: (*_NATIVE, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}
"""Functions that update running statistics, with the names of their arguments."""


def run_norm(
    statistics: FrozenStatistics | WholeBatchStatistics,
    function: Norm,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bring: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Tensor | None:
    """Run one of ``NORMS`` under ``statistics``; return ``None`` if the call updates no statistics.

    ``bring`` returns a tensor on the device of the call; the running buffers stay where they are.

    Raises
    ------
    ParallelError
        If a batch norm gets one value per channel.
    """
    given = {**dict(zip(NORMS[function], args, strict=False)), **kwargs}
    by_instance = "use_input_stats" in NORMS[function]
    if not (given.get("use_input_stats", True) if by_instance else given.get("training", False)):
        return None
    shape = given["input"].shape
    if not by_instance and shape.numel() == shape[1]:
        raise ParallelError(
            f"a batch norm in training got an input of shape {tuple(shape)}, one value per channel: a pipeline "
            "normalises each micro-batch separately; use a larger split_size, a batch size that leaves no remainder of "
            "one sample, or an instance or group norm"
        )
    if isinstance(statistics, WholeBatchStatistics) and not by_instance:
        statistics.splits_batch_norm = statistics.micro_batches > 1
    mean, variance = given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None:
        return None

    def call(blank_mean: Tensor | None, blank_variance: Tensor | None, momentum: float) -> Tensor:
        return function(**{**given, "running_mean": blank_mean, "running_var": blank_variance, "momentum": momentum})

    for name in ("input", "weight", "bias"):
        if isinstance(given.get(name), Tensor):
            given[name] = bring(given[name])
    momentum = given.get("momentum", 0.1)
    return statistics.norm(NormSite((mean, variance), momentum, by_instance, given["input"].device, call))
