import torch
from torch import Tensor, nn

from volseg.parallel.pipeline import PipelineStrategy
from volseg.parallel.pipeline.fingerprint import Fingerprint
from volseg.parallel.pipeline.record.choice import LONG, MOST_RECORDINGS, WARM_UP, Watch, situation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(2, 2), nn.Linear(2, 2), 1.0

    def forward(self, x: Tensor, mode: str = "") -> Tensor:
        return self.b(self.a(x) * self.gain)


def pipeline(net: nn.Module) -> PipelineStrategy:
    return PipelineStrategy(net, split_size=1, devices=["cpu"] * 2, cuts=["b"], launch="graphs")


def test_at_most_a_few_kinds_are_kept_and_an_idle_one_gives_way():
    strategy = pipeline(Net())
    for batch in range(1, MOST_RECORDINGS + 3):
        for _ in range(WARM_UP + 1):
            strategy(torch.zeros(batch, 2))
    assert len(strategy._recordings) == MOST_RECORDINGS
    newest = torch.zeros(MOST_RECORDINGS + 2, 2)
    assert type(strategy(newest).grad_fn).__name__ == "CatBackward0"
    for _ in range(LONG):
        strategy(newest)
    assert type(strategy(newest).grad_fn).__name__ == "_ReplayedBackward"
    assert len(strategy._recordings) == MOST_RECORDINGS


def test_watch_tells_a_forward_that_changes_from_sizes_that_differ():
    watch = Watch()
    watch.note(2, 11)
    watch.note(1, 12)
    assert watch.is_steady
    watch.note(2, 13)
    assert not watch.is_steady


def test_kind_follows_everything_plain_that_forward_could_read():
    net, x, cpu = Net(), torch.zeros(2, 2), torch.device("cpu")
    pipeline(net)(x)
    look = Fingerprint(net)
    kinds = [situation(look(), ((x,), {}), cpu)]
    assert situation(look(), ((x.clone(),), {}), cpu) == kinds[0]
    kinds.append(situation(look(), ((torch.zeros(3, 2),), {}), cpu))
    kinds.append(situation(look(), ((x.double(),), {}), cpu))
    kinds.append(situation(look(), ((x,), {"mode": "other"}), cpu))
    kinds.append(situation(look(), ((x.clone().requires_grad_(),), {}), cpu))
    with torch.no_grad():
        kinds.append(situation(look(), ((x,), {}), cpu))
    with torch.autocast("cpu"):
        kinds.append(situation(look(), ((x,), {}), cpu))
    net.gain = 2.0
    kinds.append(situation(look(), ((x,), {}), cpu))
    net.b.eval()
    kinds.append(situation(look(), ((x,), {}), cpu))
    net.a.weight.requires_grad_(False)
    kinds.append(situation(look(), ((x,), {}), cpu))
    net.a.weight.data = net.a.weight.data.clone()
    kinds.append(situation(look(), ((x,), {}), cpu))
    assert len(set(kinds)) == len(kinds)


def test_hooks_and_arguments_that_are_not_plain_are_never_recorded():
    net, x, cpu = Net(), torch.zeros(2, 2), torch.device("cpu")
    pipeline(net)(x)
    look = Fingerprint(net)
    assert situation(look(), ((x, object()), {}), cpu) is None
    net.b.register_forward_hook(lambda module, args, output: None)
    assert situation(look(), ((x,), {}), cpu) is None
