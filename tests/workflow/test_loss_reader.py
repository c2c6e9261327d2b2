import pytest
import torch

from volseg.workflow.epoch import AsyncLossReader


def test_on_a_cpu_the_losses_of_each_batch_are_there_at_once():
    assert AsyncLossReader().exchange({"loss": torch.tensor(0.5), "dice": torch.tensor(0.25)}) == {
        "loss": 0.5,
        "dice": 0.25,
    }


@pytest.mark.gpu
def test_on_a_gpu_losses_come_when_the_device_has_computed_them_and_nobody_waits():
    reader, losses = AsyncLossReader(), {"loss": torch.full((), 0.5, device="cuda")}
    torch.cuda.synchronize()
    torch.cuda._sleep(2**30)  # the device is busy for longer than the lines below take
    assert reader.exchange(losses) is None
    assert reader.exchange(losses) is None  # on the way still
    torch.cuda.synchronize()
    assert reader.exchange({"loss": torch.ones((), device="cuda")}) == {"loss": 0.5}
