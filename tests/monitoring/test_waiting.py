"""The advice comes once, when waiting is long, and fits where the cases are."""

import pytest
import torch

from volseg.data.augmented import AugmentedBatches
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.patches import PatchBatches
from volseg.monitoring.advice import WaitingAdvice, advice
from volseg.workflow import EpochRecord


class Stands:
    """A training as the hook sees it."""

    is_main_process = True
    batches = ()


def told(caplog, *waited, training=Stands):
    hook = WaitingAdvice()
    for epoch, seconds in enumerate(waited):
        record = EpochRecord(epoch=epoch, losses={}, learning_rate=0.1, seconds=10.0, seconds_waited=seconds)
        hook.on_epoch_end(training, record)
    return [record.getMessage() for record in caplog.records]


def test_it_is_said_once_and_not_of_the_first_epoch(caplog):
    (message,) = told(caplog, 9.0, 0.9, 1.5, 8.0)
    assert message.startswith("epoch 3 waited 1.5 of its 10.0 s for batches; make them in more processes")


def test_short_waits_and_followers_say_nothing(caplog):
    assert told(caplog, 9.0, 1.0, 0.2) == []

    class Follows(Stands):
        is_main_process = False

    assert told(caplog, 9.0, 9.0, training=Follows) == []


@pytest.mark.parametrize(
    ("device", "num_on_device", "expected"),
    [
        ("cuda", 3, "lie on the GPU already, so it is the augmentation: lower augmentation.margin"),
        ("cuda", 1, "2 of 3 cases lie in main memory: let more lie on the GPU if it has room (data.keep: auto,"),
        ("cuda", 0, "3 of 3 cases lie in main memory: let more lie on the GPU"),
    ],
)
def test_the_advice_fits_where_the_cases_are(device, num_on_device, expected):
    assert expected in advice(batches_of(device, num_on_device))


def test_a_cpu_waits_for_nothing(caplog):
    class OnCPU(Stands):
        batches = batches_of("cpu", 0)

    assert told(caplog, 9.0, 9.0, training=OnCPU) == []


def batches_of(device, num_on_device):
    cases = [{"case": str(n), "image": torch.zeros(1, 1, 1, 1), "label": torch.zeros(1, 1, 1, 1)} for n in range(3)]
    bank = VolumeCache(cases)
    bank.device, bank.num_on_device = torch.device(device), num_on_device
    batches = AugmentedBatches.__new__(AugmentedBatches)
    batches.batches = PatchBatches.__new__(PatchBatches)
    batches.batches.cache = bank
    return batches
