"""What a training's batches take of a GPU beside its step, followed as they are made there.

A batch is cut and augmented on a stream of its own, by a recording, while the step runs on the one before
(`AugmentedBatches`). Its results, the batch that waits, cuBLAS's memory for that stream and what the allocator keeps
for it are tens of MiB: a tenth of what a small step takes. Where patches grow each size has such a stream.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from volseg.config.schema import ExperimentConfig
from volseg.data.labels import num_indices
from volseg.device.graph import RecordedFunction
from volseg.device.pretended import find_kept, host_values
from volseg.device.streams import find_current_stream, make_stream, on_stream
from volseg.experiment.data_facts import DataFacts
from volseg.parallel.candidates.work import Batch
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.augmentation.sources import PatchSources

__all__ = ["bring_batch"]


def bring_batch(config: ExperimentConfig, facts: DataFacts, rows: int, device: torch.device) -> Batch:
    """Return a batch without values on a pretended GPU, where another one waits as long as it is pretended.

    Taken as made of cases that lie there. Not followed: augmentations of a user's own (`augmentation.own`).

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    facts : DataFacts
        Of its data set.
    rows : int
        Samples of the process.
    device : torch.device
        The pretended GPU.
    """
    sizes = [size for size in config.patch.sizes if size != config.patch.size]
    for size in sizes:  # what stays of those before: their recordings are freed where the size changes
        _make_recorded(config, facts, rows, device, size)
    recording, stream = _make_recorded(config, facts, rows, device, config.patch.size)
    with on_stream(stream):
        batch, ahead = ({name: made.clone() for name, made in recording().items()} for _ in range(2))
    find_current_stream(device).wait_stream(stream)
    find_kept({})[bring_batch, device] = recording, ahead
    return batch


def _make_recorded(
    config: ExperimentConfig, facts: DataFacts, rows: int, device: torch.device, size: tuple[int, int, int]
) -> tuple[Callable[[], dict[str, Tensor]], Any]:
    """Return what makes batches of a size, and its stream."""
    task = facts.task
    with host_values():  # its margins are numbers
        augmentation = BatchAugmentation(
            config.augmentation, size, num_classes=num_indices(task), spacing=facts.spacing
        )
    generator = torch.Generator()
    # Of the cases nothing but where they lie counts here: what they take is known without (`find_reserve`).
    stored = torch.empty(1, device=device), torch.empty(1, dtype=torch.uint8, device=device)
    images, labels = (
        torch.empty(0, channels, *augmentation.source_size, dtype=of.dtype, device=device)
        for channels, of in zip((task.num_channels, 1), stored, strict=True)
    )
    places = {
        "begins": torch.zeros(rows, dtype=torch.int64, device=device),
        "shapes": torch.zeros(rows, 3, dtype=torch.int64, device=device),
        "corners": torch.zeros(rows, 3, dtype=torch.int64, device=device),
    }

    def make(**where: Tensor) -> dict[str, Tensor]:
        parameters = augmentation.sample(rows, generator, task.num_channels, device)
        image, label = augmentation.apply_to_sources(PatchSources(stored, (images, labels), **where), parameters)
        return {"image": image, "label": label}

    stream: Any = make_stream(device)
    stream.wait_stream(find_current_stream(device))
    with on_stream(stream):
        make(**places)  # once as it is, as a training does
        return partial(RecordedFunction(make, places, stream=stream, is_step=False), places), stream
