"""Training patches: planned for a whole epoch by a pure function, then cut out batch by batch.

A plan depends only on seed and epoch, a batch only on its place in the plan. So a training resumed at any iteration
sees the same batches, with no state to save.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from volseg.data.case_store.volume_cache import ForegroundVoxels, VolumeCache
from volseg.data.cases import Batch
from volseg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The patches of an epoch."""

    cases: Tensor
    """Index of each patch's case, (iterations, B)."""
    corners: Tensor
    """First voxel of each patch in its case, (iterations, B, 3); negative if the case is smaller than the patch."""


@dataclass(frozen=True, slots=True)
class EpochPlaces:
    """Places of the source patches of an epoch that one process needs."""

    cases: Tensor
    """Index of each patch's case, (iterations, R), on the CPU."""
    corners: Tensor
    """First voxel of each source patch in its case, (iterations, R, 3), on the CPU."""
    names: list[list[str]]
    """Ids of the cases."""
    on_device: tuple[Tensor, Tensor, Tensor]
    """Result of `VolumeCache.locate`, on the cache's device: one copy per epoch, and no wait per batch."""

    def at(self, iteration: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return begins, shapes and corners of one batch."""
        begins, shapes, corners = self.on_device
        return begins[iteration], shapes[iteration], corners[iteration]


def num_foreground(batch_size: int, share: float) -> int:
    """Return the number of patches of a batch that are drawn to contain foreground, by nnU-Net's rounding.

    >>> [num_foreground(size, 0.33) for size in (1, 2, 4, 9)]
    [0, 1, 1, 3]
    """
    return batch_size - round(batch_size * (1 - share))


def plan_epoch(
    shapes: Tensor,
    foreground: ForegroundVoxels,
    patch_size: Sequence[int],
    *,
    batch_size: int,
    iterations: int,
    share: float,
    generator: torch.Generator,
    annotated: ForegroundVoxels | None = None,
    weights: Tensor | None = None,
) -> EpochPlan:
    """Choose case and place of every patch of an epoch.

    Cases come in shuffled rounds, each once per round (nnU-Net draws them with replacement). Cases with weights are
    drawn with replacement; the number of batches stays the same. A patch is placed anywhere within its case, and
    centred along an axis where the case is smaller. The last patches of each batch are moved so that they contain a
    random voxel of a random class of the case, as near to their centre as the case's border allows. If voxels may lack
    an annotation, the other patches are moved to a random annotated voxel in the same way, as in nnU-Net.

    Parameters
    ----------
    shapes : Tensor
        D, H, W of the cases, (N, 3).
    foreground : ForegroundVoxels
        Voxels of the classes; a case without any gets an ordinary patch.
    patch_size : sequence of int
        D, H, W in voxels.
    batch_size, iterations : int
        Patches per batch, batches per epoch.
    share : float
        Share of the batch that is drawn to contain foreground, see `num_foreground`.
    generator : torch.Generator
        Generator on the CPU.
    annotated : ForegroundVoxels, optional
        Annotated voxels as one class; None if all are annotated. A case without any gets ordinary patches.
    weights : Tensor, optional
        Relative probability of each case, (N,) in float64, finite and not negative; a case of 0 is never drawn.
    """
    num_patches = iterations * batch_size
    cases = _draw_cases(len(shapes), num_patches, weights, generator)
    room = shapes[cases] - torch.tensor(patch_size)
    anywhere = _draw_below(room.clamp(min=0) + 1, generator)
    voxel, found = _draw_voxels(foreground, cases, generator)
    half = torch.tensor(patch_size) // 2
    around = (voxel - half).clamp(min=torch.zeros_like(room), max=room.clamp(min=0))
    if annotated is not None:
        voxel, is_annotated = _draw_voxels(annotated, cases, generator)
        there = (voxel - half).clamp(min=torch.zeros_like(room), max=room.clamp(min=0))
        anywhere = torch.where(is_annotated[:, None], there, anywhere)
    place_in_batch = torch.arange(num_patches) % batch_size
    oversampled = (place_in_batch >= batch_size - num_foreground(batch_size, share)) & found
    corners = torch.where(oversampled[:, None], around, anywhere)
    corners = torch.where(room < 0, room.div(2, rounding_mode="trunc"), corners)
    return EpochPlan(cases.view(iterations, batch_size), corners.view(iterations, batch_size, 3))


def _draw_cases(num_cases: int, count: int, weights: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return the case of each patch: in shuffled rounds, or with replacement by weights."""
    if weights is None:
        rounds = -(-count // num_cases)
        order = torch.rand(rounds, num_cases, generator=generator, dtype=torch.float64).argsort(1)
        return order.flatten()[:count]
    ends = (weights / weights.max()).cumsum(0)  # relative to the largest: the sum of finite weights may not be finite
    lots = torch.rand(count, generator=generator, dtype=torch.float64)
    # The last end is 1 exactly and lots are below 1, so that no round-off draws a case of weight 0.
    return torch.searchsorted(ends / ends[-1], lots, right=True)


def _draw_voxels(foreground: ForegroundVoxels, cases: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a voxel of a random class of each case, and whether the case has a class."""
    if not len(foreground.voxels):
        return torch.zeros(len(cases), 3, dtype=torch.int64), torch.zeros(len(cases), dtype=torch.bool)
    count = foreground.count[cases]
    lot = torch.rand(count.shape, generator=generator, dtype=torch.float64)
    chosen = lot.masked_fill(count == 0, -1.0).argmax(1, keepdim=True)
    count = count.gather(1, chosen).squeeze(1)
    row = foreground.first[cases].gather(1, chosen).squeeze(1) + _draw_below(count.clamp(min=1), generator)
    return foreground.voxels[row.clamp(max=len(foreground.voxels) - 1)].long(), count > 0


def _draw_below(bounds: Tensor, generator: torch.Generator) -> Tensor:
    """Return random integers in [0, bounds)."""
    return (torch.rand(bounds.shape, generator=generator, dtype=torch.float64) * bounds).long()


class PatchBatches:
    """Batches of patches for any epoch, on the cache's device.

    Parameters
    ----------
    cache : VolumeCache
        The cases.
    patch_size : sequence of int
        D, H, W of the network's input; places are chosen for it.
    batch_size, iterations : int
        Patches per batch, batches per epoch.
    foreground : float
        Share of a batch that is drawn to contain foreground; nnU-Net's 0.33 by default.
    source_size : sequence of int, optional
        D, H, W of the box around each patch, with the margin for augmentation; the patch by default.
    seed : int
        Seed of the experiment.
    prefetch : int, optional
        Batches prepared ahead, each by a thread, if some cases are in main memory or mapped; by default 3 for training
        on a GPU, and none on a CPU, since the network needs its cores.

    Attributes
    ----------
    seconds_waited : float
        Seconds that the loop has waited for fetched patches since the current epoch began.

    Raises
    ------
    ConfigError
        For invalid sizes or an invalid share.
    """

    def __init__(
        self,
        cache: VolumeCache,
        patch_size: Sequence[int],
        batch_size: int,
        iterations: int,
        foreground: float = 0.33,
        source_size: Sequence[int] | None = None,
        seed: int = 0,
        prefetch: int | None = None,
    ) -> None:
        self.cache = cache
        self.patch_size = tuple(int(side) for side in patch_size)
        self.source_size = self.patch_size if source_size is None else tuple(int(side) for side in source_size)
        self.batch_size = batch_size
        self.iterations = iterations
        self.share = foreground
        self.seed = seed
        self.seconds_waited = 0.0
        self._check()
        on_gpu = cache.device.type == "cuda"
        self._pin = on_gpu
        default = 3 if on_gpu else 0
        self._prefetch = 0 if cache.on_device else default if prefetch is None else prefetch

    def __len__(self) -> int:
        return self.iterations

    def plan(self, epoch: int) -> EpochPlan:
        """Choose the patches of an epoch; `EpochPlan.corners` are those of the patch, without its margin."""
        return plan_epoch(
            self.cache.shapes,
            self.cache.foreground,
            self.patch_size,
            batch_size=self.batch_size,
            iterations=self.iterations,
            share=self.share,
            generator=torch.Generator().manual_seed(mix_seed(self.seed, epoch)),
            annotated=self.cache.annotated,
            weights=self.cache.weights,
        )

    def places(self, number: int, rows: Sequence[slice] = (slice(None),)) -> EpochPlaces:
        """Return the places of an epoch's source patches, or those of some rows of each batch.

        Raises
        ------
        DataError
            If the file of a mapped case has been truncated.
        """
        self.cache.require_files()
        plan = self.plan(number)
        margin = [(whole - side) // 2 for whole, side in zip(self.source_size, self.patch_size, strict=True)]
        cases, corners = (torch.cat([of[:, part] for part in rows], 1) for of in (plan.cases, plan.corners))
        corners = corners - torch.tensor(margin)
        begins, shapes, firsts = (
            where.to(self.cache.device) for where in self.cache.locate(cases, corners, self.source_size)
        )
        names = [[self.cache.names[case] for case in row] for row in cases.tolist()]
        return EpochPlaces(cases, corners, names, (begins, shapes, firsts))

    def fetch(self, places: EpochPlaces, start: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield the result of `VolumeCache.fetch` for each batch, starting with ``start``; threads work ahead."""
        self.seconds_waited = 0.0

        def make(iteration: int) -> tuple[Tensor, Tensor]:
            return self.cache.fetch(places.cases[iteration], places.corners[iteration], self.source_size, pin=self._pin)

        begun = time.perf_counter()
        for boxes in _make_ahead(make, range(start, len(places.names)), self._prefetch):
            self.seconds_waited += time.perf_counter() - begun
            yield boxes
            begun = time.perf_counter()

    def epoch(self, number: int, start: int = 0, rows: Sequence[slice] = (slice(None),)) -> Iterator[Batch]:
        """Yield the batches of epoch ``number``, starting with batch ``start``, or some rows of each.

        Each batch has ``image`` (B, C, *source_size) in float32 and ``label`` (B, 1, *source_size) in uint8, both on
        the cache's device, and ``case``, the ids. Only the requested rows are cut out.
        """
        places = self.places(number, rows)
        for iteration, boxes in enumerate(self.fetch(places, start), start):
            image, label = self.cache.join(boxes, places.at(iteration), self.source_size)
            yield {"image": image, "label": label, "case": places.names[iteration]}

    def _check(self) -> None:
        margins = [whole - side for whole, side in zip(self.source_size, self.patch_size, strict=True)]
        is_positive = min(self.batch_size, self.iterations, *self.patch_size) > 0
        if not is_positive or not 0 <= self.share <= 1 or any(margin < 0 or margin % 2 for margin in margins):
            raise ConfigError(
                "patches need positive sizes and counts, a share of foreground in [0, 1], and a source_size that "
                "exceeds patch_size by the same number of voxels on both sides, as BatchAugmentation.source_size does; "
                f"got patch_size {self.patch_size}, batch_size {self.batch_size}, iterations {self.iterations}, share "
                f"{self.share}, source_size {self.source_size}"
            )


def _make_ahead(
    make: Callable[[int], tuple[Tensor, Tensor]], indices: Sequence[int], depth: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``make(i)`` for every index, in order, with ``depth`` items and threads ahead of the caller.

    Several threads, because a thread that waits for a page of a mapped file does nothing else.
    """
    if depth == 0:
        yield from map(make, indices)
        return
    with ThreadPoolExecutor(depth, thread_name_prefix="patches") as threads:
        pending: deque[Future[tuple[Tensor, Tensor]]] = deque()
        try:
            for index in indices:
                pending.append(threads.submit(make, index))
                if len(pending) > depth:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # the caller may stop in the middle of an epoch
            for future in pending:
                future.cancel()


def mix_seed(*numbers: int) -> int:
    """Return torch's seed for some numbers: an experiment's seed, an epoch, a position, a row.

    >>> mix_seed(0, 1, 2) == mix_seed(0, 1, 2) != mix_seed(0, 2, 1)
    True

    An epoch's patches, the effects on its first batch, and custom effects on that batch's first row have separate
    seeds:

    >>> len({mix_seed(0, 1), mix_seed(0, 1, 0), mix_seed(0, 1, 0, 0)})
    3
    """
    # SeedSequence spreads neighbouring numbers over unrelated seeds; without their count, (0, 1) would be (0, 1, 0).
    # torch takes a signed 64-bit seed.
    return int(np.random.SeedSequence((len(numbers), *numbers)).generate_state(1, np.uint64)[0]) >> 1
