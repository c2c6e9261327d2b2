"""Augmented batches on the training device; each depends only on seed, epoch and position."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate, islice, pairwise
from typing import Protocol

import torch
from torch import Tensor

from volseg.data.cases import Batch
from volseg.data.patches import PatchBatches, mix_seed
from volseg.device.graph import RecordedFunction
from volseg.errors import ConfigError
from volseg.transforms.augmentation import AugmentationParameters, BatchAugmentation, triton_reading
from volseg.transforms.augmentation.own import OwnAugmentations
from volseg.transforms.augmentation.triton_reading import PatchSources


class EpochBatches(Protocol):
    """Batches of any epoch, starting at any position."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the epoch's batches, starting with batch ``start``."""


def remaining_batches(batches: Iterable[Batch] | EpochBatches, number: int, start: int) -> Iterator[Batch]:
    """Return the epoch's batches, starting with batch ``start``; the batches before it are skipped in an iterable."""
    epoch = getattr(batches, "epoch", None)
    if epoch is not None:
        return iter(epoch(number, start=start))
    assert isinstance(batches, Iterable)
    return islice(iter(batches), start, None)


class AugmentedBatches:
    """Cut patches and augment them.

    The random numbers of every batch are seeded by (seed, epoch, position). So a training resumed in the middle of an
    epoch sees the same batches, without any state to save. On a GPU, cutting and augmenting are captured as one CUDA
    graph, which runs during the training on the batch before, like the copies of patches from main memory. The bits of
    a batch do not depend on where its cases are stored.

    Parameters
    ----------
    batches : PatchBatches
        Patches of the augmentation's ``source_size``.
    augmentation : BatchAugmentation
        Returns patches of its own ``patch_size``.
    seed : int
        Seed of the experiment.
    device : torch.device
        Device of the random numbers and of the batches.
    rows : sequence of slice, optional
        Rows of each batch that this process computes, one slice per replica; all by default. The random numbers are
        those of the whole batch, so a row is the same as in one process: on a CPU bit for bit, with as many threads. On
        a GPU the bits of a slice depend only on its own rows, as each slice is augmented separately.
    own : OwnAugmentations, optional
        Applied to each sample after ``augmentation``, with random numbers for its place in the whole batch. They are
        never part of a capture, which a user's code may not support.

    Raises
    ------
    ConfigError
        If ``rows`` are not separate slices of a batch.
    """

    def __init__(
        self,
        batches: PatchBatches,
        augmentation: BatchAugmentation,
        *,
        seed: int,
        device: torch.device | str,
        rows: Sequence[slice] | None = None,
        own: OwnAugmentations | None = None,
    ) -> None:
        self.batches = batches
        self.augmentation = augmentation
        self.own = own
        self.rows = [slice(0, batches.batch_size)] if rows is None else list(rows)
        _check_rows(self.rows, batches.batch_size)
        self.seed = seed
        self.generator = torch.Generator(device)
        self._own_generator = torch.Generator(device)  # a capture uses the other generator
        self._recording: RecordedFunction | None = None
        self._boxes: tuple[Tensor, Tensor] | None = None
        self._fused = self.generator.device.type == "cuda" and triton_reading.available()
        if self.generator.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.generator.device)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def batch_size(self) -> int:
        """Samples of a whole batch; ``rows`` of it are computed."""
        return self.batches.batch_size

    def release(self) -> None:
        """Free the capture and the copied patches; a later batch creates them again."""
        if self._recording is not None:
            self._stream.synchronize()  # the last batch is computed during the training on the batch before
            self._recording.release()
        self._recording = self._boxes = None

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch ``number`` from batch ``start`` on."""
        make = self._make_recorded if self.batches.cache.device.type == "cuda" else self._make_plainly
        yield from make(number, start)

    def _make_plainly(self, number: int, start: int) -> Iterator[Batch]:
        lengths = [part.stop - part.start for part in self.rows]
        for position, batch in enumerate(self.batches.epoch(number, start, self.rows), start):
            parameters = self._draw(number, position).to(batch["image"].device)
            shares = zip(batch["image"].split(lengths), batch["label"].split(lengths), self.rows, strict=True)
            made = [self.augmentation.apply(image, label, parameters.select(part)) for image, label, part in shares]
            yield {**batch, **self._augment_more(_join(made), number, position)}

    def _draw(self, number: int, position: int) -> AugmentationParameters:
        self.generator.manual_seed(mix_seed(self.seed, number, position))
        return self._draw_next()

    def _draw_next(self) -> AugmentationParameters:
        """Draw for the whole batch, not only for ``rows``: a row's numbers depend on its place in the batch."""
        return self.augmentation.sample(self.batches.batch_size, self.generator, self.batches.cache.num_channels)

    def _make_recorded(self, number: int, start: int) -> Iterator[Batch]:
        """Compute each batch while the consumer works on the batch before."""
        places = self.batches.places(number, self.rows)
        for indices in places.on_device:
            # A loop that ends in mid-epoch frees them while the batch ahead may still read them.
            indices.record_stream(self._stream)

        def make_ahead(position: int, fetched: Sequence[Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event]:
            # One batch ahead, not more: the host is many steps ahead of the device.
            self._stream.wait_stream(torch.cuda.current_stream(self.batches.cache.device))
            with torch.cuda.stream(self._stream):
                self._bring(fetched, len(places.names[position]))
                where = dict(zip(("begins", "shapes", "corners"), places.at(position), strict=True))
                if self._recording is None:
                    # One eager run fills the augmentation's caches; the seed below discards its draw.
                    self._cut_and_augment(**where)
                    self._recording = RecordedFunction(
                        self._cut_and_augment, where, generators=[self.generator], stream=self._stream
                    )
                self.generator.manual_seed(mix_seed(self.seed, number, position))
                batch = {name: tensor.clone() for name, tensor in self._recording(where).items()}
                return self._augment_more(batch, number, position), self._stream.record_event()

        with closing(self.batches.fetch(places, start)) as fetched:
            ahead = make_ahead(start, next(fetched)) if start < len(self) else None
            for position in range(start, len(self)):
                assert ahead is not None
                batch, ready = ahead
                ahead = make_ahead(position + 1, next(fetched)) if position + 1 < len(self) else None
                consumer = torch.cuda.current_stream(self.batches.cache.device)
                consumer.wait_event(ready)
                for tensor in batch.values():
                    tensor.record_stream(consumer)
                yield {**batch, "case": places.names[position]}

    def _bring(self, fetched: Sequence[Tensor], count: int) -> None:
        """Copy the fetched values of ``count`` patches to the device, once the batch before has read its own there."""
        for box, values in zip(self._make_room(count), fetched, strict=True):
            box[: len(values)].copy_(values, non_blocking=True)

    def _make_room(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the boxes of fetched patches on the device; a capture needs the same addresses every time."""
        cache = self.batches.cache
        if self._boxes is None:
            self._boxes = cache.make_boxes(
                0 if cache.on_device else count, self.batches.source_size, device=cache.device
            )
        return self._boxes

    def _augment_more(self, batch: dict[str, Tensor], number: int, position: int) -> dict[str, Tensor]:
        """Apply the custom augmentations to each sample of a batch."""
        if not self.own:
            return batch
        places = [place for part in self.rows for place in range(part.start, part.stop)]
        made = []
        for image, label, place in zip(batch["image"], batch["label"], places, strict=True):
            if self._own_generator.device != image.device:
                self._own_generator = torch.Generator(image.device)
            self._own_generator.manual_seed(mix_seed(self.seed, number, position, place))
            made.append(self.own.apply(image, label, self._own_generator))
        images, labels = zip(*made, strict=True)
        return {"image": torch.stack(images), "label": torch.stack(labels)}

    def _cut_and_augment(self, begins: Tensor, shapes: Tensor, corners: Tensor) -> dict[str, Tensor]:
        """Return this process's rows of a batch, given the places of its patches; see `PatchSources`."""
        cache, parameters = self.batches.cache, self._draw_next()
        sources = PatchSources(cache.stored, self._make_room(len(begins)), begins, shapes, corners)
        ends = list(accumulate(part.stop - part.start for part in self.rows))
        mine = [slice(*pair) for pair in pairwise([0, *ends])]
        pairs = zip(mine, self.rows, strict=True)
        return _join([self._make_rows(sources.select(own), parameters.select(part)) for own, part in pairs])

    def _make_rows(self, sources: PatchSources, parameters: AugmentationParameters) -> tuple[Tensor, Tensor]:
        if self._fused:
            return self.augmentation.apply_to_sources(sources, parameters)
        image, label = sources.cut(self.batches.source_size)
        return self.augmentation.apply(image, label, parameters)


def _join(made: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the slices' images and labels as one batch; a single slice is not copied."""
    images, labels = zip(*made, strict=True)
    image, label = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (images, labels))
    return {"image": image, "label": label}


def _check_rows(rows: Sequence[slice], batch_size: int) -> None:
    plain = [part for part in rows if part.step in (None, 1) and None not in (part.start, part.stop)]
    ends = sorted((part.start, part.stop) for part in plain)
    bounds = [0, *(bound for pair in ends for bound in pair), batch_size]
    if not rows or len(ends) < len(rows) or bounds != sorted(bounds) or any(first == last for first, last in ends):
        raise ConfigError(
            f"rows must be separate slices (start, stop) of the {batch_size} rows of a batch, none empty, got "
            f"{list(rows)}; Replicas.deal returns such slices"
        )


class GrowingBatches:
    """Batches with a patch size that depends on the epoch; all epochs have the same length.

    The patch size and the batches of an epoch depend only on its number, so a training resumed in any epoch sees the
    same batches.

    Parameters
    ----------
    choose : callable
        Returns the batches of an epoch, the same object for all epochs of one size.
    """

    def __init__(self, choose: Callable[[int], AugmentedBatches]) -> None:
        self.of_epoch = choose

    def __len__(self) -> int:
        return len(self.of_epoch(0))

    @property
    def batch_size(self) -> int:
        """Samples of a whole batch, of any size."""
        return self.of_epoch(0).batch_size

    def changes_at(self, epoch: int) -> bool:
        """Return whether the patch size of an epoch differs from that of the epoch before."""
        return epoch > 0 and self.of_epoch(epoch) is not self.of_epoch(epoch - 1)

    def release_before(self, epoch: int) -> None:
        """Free the GPU memory of the batches of the epoch before, except the cases."""
        self.of_epoch(epoch - 1).release()

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch ``number`` from batch ``start`` on."""
        return self.of_epoch(number).epoch(number, start)
