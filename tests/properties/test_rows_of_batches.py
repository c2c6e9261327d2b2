"""Several processes together compute each row of a batch exactly once."""

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from volseg.config.augmentation import AugmentationConfig
from volseg.data.augmented import AugmentedBatches
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.patches import PatchBatches
from volseg.errors import ConfigError
from volseg.transforms.augmentation import BatchAugmentation

PATCH = (8, 6, 7)
ITERATIONS = 3
SIDES = [(13, 9, 12), (9, 14, 5), (7, 8, 16)]
EFFECTS = (
    "rotation",
    "scaling",
    "noise",
    "blur",
    "brightness",
    "contrast",
    "low_resolution",
    "inverted_gamma",
    "gamma",
)
OFTEN = {effect: {"probability": 0.5} for effect in EFFECTS}
ELASTIC = {"elastic": {"probability": 0.5, "spacing_voxels": 5, "displacement_voxels": (0, 2)}}


SIZES_BYTES = [sides[0] * sides[1] * sides[2] * 9 for sides in SIDES]  # two channels of float32 and a label
BUDGETS = st.sampled_from([0, min(SIZES_BYTES), sum(sorted(SIZES_BYTES)[:2]), sum(SIZES_BYTES)])
"""Room on a device for none, one, two and all of the cases."""


class RecordedBank(VolumeCache):
    """A bank that records the requested boxes."""

    asked = ()

    def fetch(self, cases, corners, size, *, pin=False):
        self.asked = [*self.asked, *zip(cases.tolist(), map(tuple, corners.tolist()), strict=True)]
        return super().fetch(cases, corners, size, pin=pin)


@cache
def cases():
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, sides in enumerate(SIDES):
        image = torch.randn(2, *sides, generator=generator)
        made.append({"case": f"case_{number}", "image": image, "label": (image[:1] > 0.5).to(torch.uint8)})
    return made


@cache
def augmentation(elastic: bool) -> BatchAugmentation:
    config = AugmentationConfig.model_validate(OFTEN | (ELASTIC if elastic else {}))
    return BatchAugmentation(config, PATCH, num_classes=2)


def batches(
    batch_size, rows=None, *, budget_bytes=0, elastic=False, prefetch=None, weights=(1, 1, 1)
) -> AugmentedBatches:
    augment = augmentation(elastic)
    weighed = [{**case, "weight": weight} for case, weight in zip(cases(), weights, strict=True)]
    bank = RecordedBank(weighed, budget_bytes=budget_bytes)
    patches = PatchBatches(
        bank, PATCH, batch_size, ITERATIONS, source_size=augment.source_size, seed=3, prefetch=prefetch
    )
    return AugmentedBatches(patches, augment, seed=3, device="cpu", rows=rows)


def deal(batch_size: int, replicas: int) -> list[slice]:
    """Return each replica's rows, as even as can be."""
    ends = [round(batch_size * replica / replicas) for replica in range(replicas + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


@st.composite
def layouts(draw):
    """Draw a batch size, the rows of every process, one slice per replica, and where the epoch is entered."""
    batch_size = draw(st.integers(1, 7))
    spans = deal(batch_size, draw(st.integers(1, batch_size)))
    processes = draw(st.integers(1, len(spans)))
    return batch_size, [spans[process::processes] for process in range(processes)], draw(st.integers(0, ITERATIONS))


@settings(max_examples=30)
@given(
    layout=layouts(),
    budgets=st.lists(BUDGETS, min_size=8, max_size=8),
    elastic=st.booleans(),
    prefetch=st.none() | st.integers(0, 3),
    epoch=st.integers(0, 3),
    weights=st.sampled_from([(1, 1, 1), (2, 0, 0.5)]),
)
def test_the_rows_of_all_processes_are_the_batch_of_one(layout, budgets, elastic, prefetch, epoch, weights):
    """Each process stores as many cases as its device has room for, which batches do not show."""
    batch_size, processes, start = layout
    made = {"elastic": elastic, "weights": weights}
    whole = list(batches(batch_size, budget_bytes=budgets[0], **made).epoch(epoch, start))
    assert len(whole) == ITERATIONS - start
    for rows, budget_bytes in zip(processes, budgets[1:], strict=False):
        of_process = batches(batch_size, rows, budget_bytes=budget_bytes, prefetch=prefetch, **made)
        for mine, batch in zip(of_process.epoch(epoch, start), whole, strict=True):
            for name in ("image", "label"):
                assert torch.equal(mine[name], torch.cat([batch[name][part] for part in rows]))
            assert mine["case"] == [name for part in rows for name in batch["case"][part]]


@settings(max_examples=20)
@given(layout=layouts(), epoch=st.integers(0, 3))
def test_every_sample_of_an_epoch_is_cut_out_once_wherever_the_epoch_is_entered(layout, epoch):
    batch_size, processes, start = layout
    one = batches(batch_size)
    planned = one.batches.places(epoch)
    corners = map(tuple, planned.corners[start:].flatten(0, 1).tolist())
    wanted = Counter(zip(planned.cases[start:].flatten().tolist(), corners, strict=True))
    cut = Counter()
    for rows in processes:
        own = batches(batch_size, rows)
        list(own.epoch(epoch, start))
        cut.update(own.batches.cache.asked)
    assert cut == wanted


@pytest.mark.parametrize("parts", [[], [(0, 0)], [(0, 3), (2, 4)], [(2, 5)], [(-1, 4)], [(None, 2)], [(0, 4, 2)]])
def test_rows_that_a_batch_does_not_have_are_refused(parts):
    with pytest.raises(ConfigError, match=r"rows must be separate slices \(start, stop\) of the 4 rows of a batch"):
        batches(4, [slice(*part) for part in parts])
