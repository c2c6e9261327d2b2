"""A batch is a function of seed, epoch and position, independent of the loop and of the place of its computation."""

import warnings

import pytest
import torch

from volseg.config.augmentation import AugmentationConfig
from volseg.data.augmented import AugmentedBatches
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.patches import PatchBatches, mix_seed
from volseg.transforms.augmentation import BatchAugmentation, triton_reading

PATCH = (12, 10, 8)
ITERATIONS = 6
GPU = pytest.mark.gpu
DEVICES = ["cpu", "cpu:one case", *(pytest.param(where, marks=GPU) for where in ("cuda", "cuda:one case"))]
SIDES = [(20, 18, 16), (15, 21, 7), (11, 12, 30)]
ROOM = {"no case": 0, "one case": 15 * 21 * 7 * 5, "two cases": (15 * 21 * 7 + 11 * 12 * 30) * 5}


def made_on(where: str, rows=None) -> AugmentedBatches:
    """Return batches of a device that stores its default number of cases, or has room for some."""
    device, _, room = where.partition(":")
    generator = torch.Generator().manual_seed(0)
    cases = []
    for number, sides in enumerate(SIDES):
        image = torch.randn(1, *sides, generator=generator)
        cases.append({"case": f"case_{number}", "image": image, "label": (image > 0.5).to(torch.uint8)})
    augmentation = BatchAugmentation(AugmentationConfig(), PATCH, num_classes=2)
    bank = VolumeCache(cases, device=device, budget_bytes=ROOM.get(room))
    patches = PatchBatches(bank, PATCH, 4, ITERATIONS, source_size=augmentation.source_size)
    return AugmentedBatches(patches, augmentation, seed=0, device=device, rows=rows)


def assert_same(batches, expected):
    for one, other in zip(batches, expected, strict=True):
        assert one["case"] == other["case"]
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["label"], other["label"])


def one_by_one(batches: AugmentedBatches, epoch: int):
    """Return the epoch's batches, computed one after another."""
    places = batches.batches.places(epoch)
    for position, (ids, fetched) in enumerate(zip(places.names, batches.batches.fetch(places), strict=True)):
        batches._bring(fetched, len(ids))
        batches.generator.manual_seed(mix_seed(batches.seed, epoch, position))
        batch = batches._cut_and_augment(*places.at(position))
        torch.cuda.synchronize()
        yield {**batch, "case": ids}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 1, ITERATIONS - 1, ITERATIONS])
def test_an_epoch_taken_up_at_a_position_goes_on_as_it_would_have(device, start):
    whole = list(made_on(device).epoch(2))
    assert_same(made_on(device).epoch(2, start=start), whole[start:])


@pytest.mark.parametrize("device", DEVICES)
def test_an_epoch_left_early_leaves_no_trace_in_the_next(device):
    batches = made_on(device)
    left = batches.epoch(0)
    next(left)
    left.close()
    assert_same(batches.epoch(1), list(made_on(device).epoch(1)))


@pytest.mark.parametrize("device", DEVICES)
def test_two_epochs_at_a_time_do_not_disturb_each_other(device):
    batches = made_on(device)
    pairs = list(zip(batches.epoch(0), batches.epoch(1), strict=True))
    for number in range(2):
        assert_same([pair[number] for pair in pairs], list(made_on(device).epoch(number)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_may_keep_its_batches_and_write_to_them(device):
    kept = list(made_on(device).epoch(0))
    written = []
    for batch in made_on(device).epoch(0):
        written.append({name: value.clone() if name != "case" else value for name, value in batch.items()})
        batch["image"].fill_(float("nan"))
        batch["label"].fill_(9)
    assert_same(written, kept)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bits_of_a_slice_do_not_depend_on_the_other_slices_of_its_process(device):
    halves = [slice(0, 2), slice(2, 4)]
    alone = [list(made_on(device, [half]).epoch(1)) for half in halves]
    together = list(made_on(device, halves).epoch(1))
    joined = [
        {
            "case": first["case"] + second["case"],
            **{name: torch.cat([first[name], second[name]]) for name in ("image", "label")},
        }
        for first, second in zip(*alone, strict=True)
    ]
    assert_same(together, joined)
    for own, whole in zip(together, made_on(device).epoch(1), strict=True):
        assert own["case"] == whole["case"]
        # As on the fused batches: sums and products of four samples may round otherwise than those of two.
        torch.testing.assert_close(own["image"], whole["image"], atol=5e-3, rtol=0)
        assert (own["label"] != whole["label"]).float().mean() < 1e-3


@pytest.mark.parametrize("rows", [None, [slice(1, 4)], [slice(0, 1), slice(2, 4)]], ids=str)
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_batch_is_the_same_bits_wherever_its_cases_lie(device, room, rows):
    partly = made_on(f"{device}:{room}", rows)
    assert partly.batches.cache.num_on_device == list(ROOM).index(room)
    whole = made_on(device, rows)
    assert whole.batches.cache.on_device is (device == "cuda")
    for epoch in range(2):
        assert_same(partly.epoch(epoch), whole.epoch(epoch))


@pytest.mark.gpu
@pytest.mark.parametrize("room", ROOM)
def test_no_fetched_patch_waits_for_the_device(room):
    batches = made_on(f"cuda:{room}")
    list(batches.epoch(0))  # recorded, and page-locked memory is there
    epoch = batches.epoch(1)
    next(epoch)  # the places are copied
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        list(epoch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda", "cuda:one case", "cuda:no case"])
def test_recorded_batches_made_ahead_are_those_made_one_by_one(where):
    expected = list(one_by_one(made_on(where), 1))
    batches, got = made_on(where), []
    product = torch.eye(2048, device="cuda")
    for batch in batches.epoch(1):
        for _ in range(20):  # the loop's own work, milliseconds behind the host, on another stream than the batches
            product = product @ product
        # Read behind that work: a batch that the one ahead overwrote, or that was not waited for, shows here.
        got.append({**batch, "image": batch["image"] * product[0, 0], "label": batch["label"] * 1})
    assert_same(got, expected)


@pytest.mark.gpu
def test_fused_batches_are_the_plain_ones():
    assert triton_reading.available()
    for fused, plain in zip(made_on("cuda").epoch(0), made_on("cuda")._make_plainly(0, 0), strict=True):
        # 5e-3: positions differ by 1e-5 voxels, and a power of a number near 0 is steep.
        torch.testing.assert_close(fused["image"], plain["image"], atol=5e-3, rtol=0)
        assert (fused["label"] != plain["label"]).float().mean() < 1e-3
