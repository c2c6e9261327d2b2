"""Attention written out in networks, by the kernels' plain form, against the plain network: two steps."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, assert_no_coarser, attention_by_plain_forms, check_beside_plain, measure_rounding
from in_group import in_group
from monai.networks.blocks.selfattention import SABlock
from monai.networks.nets.swin_unetr import WindowAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.device import fusions
from volseg.errors import UnsupportedOperatorError
from volseg.parallel import FastKernels
from volseg.parallel.spatial.plan.shards import Fetch
from volseg.parallel.spatial.transport.one_process import LocalDevices

Heads = Callable[["Net", Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A volume's voxels as tokens in four windows, with heads that attend, and a convolution after them."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 12, 3, padding=1), nn.Conv3d(12, 2, 3, padding=1)
        self.qkv = nn.Linear(12, 36)
        self.bias = nn.Parameter(torch.randn(3, 12, 12))
        self.table = nn.Parameter(torch.randn(23, 3))
        self.each = nn.Parameter(torch.randn(12))
        places = torch.arange(12)
        self.register_buffer("index", places[:, None] - places + 11)
        self.register_buffer("mask", torch.where(torch.rand(2, 12, 12) < 0.4, -100.0, 0.0))
        self.heads = heads

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image).flatten(2).transpose(1, 2)  # (B, 48, 12)
        qkv = self.qkv(x.reshape(-1, 12, 12)).reshape(-1, 12, 3, 3, 4).permute(2, 0, 3, 1, 4)
        found = self.heads(self, qkv[0], qkv[1], qkv[2]).transpose(1, 2).reshape(x.shape)
        result: Tensor = self.last((x + found).transpose(1, 2).reshape(image.shape[0], 12, *image.shape[2:]))
        return result


def like_swin(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = net.table[net.index.reshape(-1)].reshape(12, 12, -1).permute(2, 0, 1).contiguous()
    scores = (q * 0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
    scores = scores.view(-1, 2, 3, 12, 12) + net.mask.unsqueeze(1).unsqueeze(0)
    weights = F.dropout(F.softmax(scores.view(-1, 3, 12, 12), dim=-1), 0.0).to(v.dtype)
    return weights @ v


def like_unetr(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("blxd,blyd->blxy", q, k) * 0.5).softmax(dim=-1)
    return torch.einsum("bhxy,bhyd->bhxd", weights, v)


def one_head(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(-1, 12, 4) for t in (q, k, v))
    scores = torch.bmm(q, k.mT).div(2.0) + net.each
    return torch.bmm(torch.softmax(scores, -1), v).view(-1, 3, 12, 4)


def seen(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT + net.bias
    total = scores.detach().mean()
    return scores.softmax(-1) @ v * total.sigmoid()


def seen_behind(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT + net.bias
    weights = scores.softmax(-1)
    found = weights @ v
    return found * weights.amax(-1, keepdim=True) + scores.mean()


def twice(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.softmax(-1) @ v + (net.bias + scores * 0.1).softmax(-1) @ v.flip(-1)


def in_place(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores += net.bias
    return scores.softmax(-1) @ v


def query_changed(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1.0
    scores = q @ k.mT + net.bias
    if not torch.is_grad_enabled():
        q.mul_(3.0)  # none of the scores' business
    return scores.softmax(-1) @ v


def view_changed(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.view(-1, 2, 3, 12, 12).add_(net.mask.unsqueeze(1))
    return scores.softmax(-1) @ v


def hooked(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    if scores.requires_grad:
        scores.register_hook(lambda gradient: gradient * 2)
    return (scores + net.bias).softmax(-1) @ v


def without_gradients(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        scores = q @ k.mT + net.bias
    return scores.softmax(-1) @ v


def checkpointed(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda *given: like_swin(net, *given), q, k, v, use_reentrant=False)
    return result


def checkpoints_between(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = checkpoint(lambda q, k: q @ k.mT + net.bias, q, k, use_reentrant=False)
    result: Tensor = checkpoint(lambda scores, v: scores.softmax(-1) @ v, scores, v, use_reentrant=False)
    return result


def hidden_row(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(net.mask[0] < 0, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


HEADS: dict[str, tuple[Heads, int, int]] = {
    "like SwinUNETR": (like_swin, 1, 1),
    "like UNETR": (like_unetr, 1, 1),
    "one head": (one_head, 1, 1),
    "bias of matrices": (lambda net, q, k, v: (q @ k.mT + net.bias).softmax(-1) @ v, 1, 1),
    "bias in front": (lambda net, q, k, v: torch.add(net.bias, torch.matmul(q, k.mT)).softmax(-1).matmul(v), 1, 1),
    "bias of rows": (lambda net, q, k, v: (q @ k.mT + net.each[:, None]).softmax(3) @ v, 1, 1),
    "cast before": (lambda net, q, k, v: ((q @ k.mT).to(torch.float64) + net.bias).softmax(-1) @ v, 1, 1),
    "reshaped": (
        lambda net, q, k, v: (q @ k.mT).reshape(-1, 6, 12, 12).reshape(q.shape[0], 3, 12, 12).softmax(-1) @ v,
        1,
        1,
    ),
    "twice": (twice, 2, 2),
    "seen": (seen, 0, 0),
    "seen behind": (seen_behind, 1, 1),
    "hooked": (hooked, 0, 0),
    "changed in place": (in_place, 0, 0),
    "a view changed": (view_changed, 0, 0),
    "a query changed": (query_changed, 1, 0),
    "scores without gradients": (without_gradients, 0, 1),
    "checkpointed": (checkpointed, 2, 1),
    "checkpoints between": (checkpoints_between, 0, 1),
    "no scores": (lambda net, q, k, v: (q @ k.mT + net.bias) @ v, 0, 0),
    "softmax of rows": (lambda net, q, k, v: (q @ k.mT).softmax(-2) @ v, 0, 0),
    "scaled behind": (lambda net, q, k, v: ((q @ k.mT + net.bias) * 0.5).softmax(-1) @ v, 0, 0),
    "three terms": (lambda net, q, k, v: (q @ k.mT + net.bias + net.each + net.mask[0]).softmax(-1) @ v, 0, 0),
    "term of a volume": (lambda net, q, k, v: (q @ k.mT + q.sum(-1, keepdim=True)).softmax(-1) @ v, 0, 1),
    "dropout": (lambda net, q, k, v: F.dropout((q @ k.mT).softmax(-1), 1.0) @ v, 0, 0),
    "hidden": (hidden_row, 0, 0),
    "transposed behind": (lambda net, q, k, v: (q @ k.mT).softmax(-1).mT @ v, 0, 0),
}
"""What is written, and how often it is ours: in training, with what a checkpoint computes again, and in evaluation."""

ALONE = ("fast", "two", "three", "two axes", "fixed order", "one, recomputed", "two, recomputed")
"""Ways in one process."""

SEVERAL = {"two": 2, "fixed order": 2, "three": 3}
"""Slabs."""

MOVED = ("like SwinUNETR", "checkpointed", "reshaped")
"""Whose windows are taken apart by twos: three slabs of four hold some of a pair alone, and scores are written."""


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Use the plain forms of the kernels on a CPU; return their calls."""
    with attention_by_plain_forms(torch.bfloat16) as found:
        yield found


def make_image(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(2, 2, 4, 4, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))


def list_ways(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return each name with the first two ways, and with two of the others in turn."""
    others = ALONE[2:]
    return [
        (name, way)
        for row, name in enumerate(names)
        for way in (*ALONE[:2], others[row % len(others)], others[(row + 2) % len(others)])
    ]


@pytest.mark.parametrize(("name", "way"), list_ways(HEADS))
def test_it_is_exact(name: str, way: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    heads, trained, evaluated = HEADS[name]
    if way not in ("fast", "one, recomputed") and name == "hooked":
        pytest.skip("a hook on several slabs is refused")
    if way == "three" and name == "a view changed":
        pytest.skip("what moves planes between slabs is a copy, and may not be changed in place")
    check_beside_plain(Net(heads).double(), WAYS[way], make_image())
    if way == "two axes" or (way == "three" and name in MOVED):
        assert not calls  # two cut dims that are merged into one are gathered: nothing is left of slabs
    elif "recomputed" not in way:
        again = trained // 2 if name == "checkpointed" else trained
        slabs = SEVERAL.get(way, 1)
        assert calls.count("attend") == slabs * (3 * trained + 4 * evaluated)
        assert calls.count("differentiate") == slabs * 3 * again
    else:
        assert bool(calls) == bool(trained + evaluated)


class Windows(nn.Module):
    """MONAI's attention of windows, shifted ones too, between convolutions."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 12, 3, padding=1), nn.Conv3d(12, 2, 3, padding=1)
        self.attention = WindowAttention(12, num_heads=3, window_size=(2, 2, 3), qkv_bias=True)
        self.register_buffer("mask", torch.where(torch.rand(4, 12, 12) < 0.4, -100.0, 0.0) if shifted else None)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image).movedim(1, -1)
        windows = x.view(-1, 2, 2, 2, 2, 1, 3, 12).permute(0, 1, 3, 5, 2, 4, 6, 7).contiguous().view(-1, 12, 12)
        found = self.attention(windows, self.mask).view(-1, 2, 2, 1, 2, 2, 3, 12)
        found = found.permute(0, 1, 4, 2, 5, 3, 6, 7).contiguous().view(x.shape)
        result: Tensor = self.last((x + found).movedim(-1, 1))
        return result


class Tokens(nn.Module):
    """MONAI's attention of all voxels, between convolutions."""

    def __init__(self, **told: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 12, 3, padding=1), nn.Conv3d(12, 2, 3, padding=1)
        self.attention = SABlock(12, num_heads=3, **told)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        found = self.attention(x.flatten(2).transpose(-1, -2))
        result: Tensor = self.last(x + found.transpose(-1, -2).reshape(x.shape))
        return result


class Crossed(nn.Module):
    """Attention of all voxels to those of a coarser level, with a bias of rows, of columns, or of both."""

    def __init__(self, rows: bool, columns: bool, last: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 12, 3, padding=1), nn.Conv3d(12, 2, 3, padding=1)
        # A bias of keys changes no softmax: its gradient is zero but for rounding.
        self.queries, self.keys = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.values = nn.Linear(12, 3 * last)
        self.out = nn.Linear(3 * last, 12)
        self.bias = nn.Parameter(torch.randn(3, 48 if rows else 1, 24 if columns else 1))

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        tokens, fewer = (t.flatten(2).transpose(1, 2) for t in (x, F.avg_pool3d(x, (1, 2, 1))))
        rows = self.queries(tokens), self.keys(fewer), self.values(fewer)
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in rows)
        found = (q @ k.transpose(-2, -1) * 0.5 + self.bias).softmax(-1) @ v
        found = self.out(found.transpose(1, 2).flatten(2))
        result: Tensor = self.last(x + found.transpose(1, 2).reshape(x.shape))
        return result


BLOCKS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "windows": (lambda: Windows(shifted=False), True),
    "shifted windows": (lambda: Windows(shifted=True), True),
    "tokens": (Tokens, True),
    "tokens, three projections": (lambda: Tokens(use_combined_linear=False, qkv_bias=True), True),
    "crossed": (lambda: Crossed(rows=True, columns=True), True),
    "crossed, other values": (lambda: Crossed(rows=False, columns=True, last=5), True),
    "crossed, bias of rows": (lambda: Crossed(rows=True, columns=False), True),
    "tokens, kept weights": (lambda: Tokens(save_attn=True), False),
    "tokens, causal": (lambda: Tokens(causal=True, sequence_length=48), False),
}


@pytest.mark.parametrize(("name", "way"), list_ways(BLOCKS))
def test_monais_blocks_are_exact(name: str, way: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    make, is_ours = BLOCKS[name]
    plain = make().double()
    check_beside_plain(plain, WAYS[way], make_image())
    is_gathered = way == "two axes" or (way == "three" and "windows" in name)  # or fewer rows of windows than slabs
    assert bool(calls) == (is_ours and not is_gathered)
    calls.clear()
    with fusions.without("attention"):
        check_beside_plain(plain, WAYS[way], make_image())
    assert not calls


def compare_in_process(name: str) -> int:
    """Compare with one slab per process; return how often our attention ran."""
    torch.manual_seed(0)
    with attention_by_plain_forms() as found:
        net = (Net(HEADS[name][0]) if name in HEADS else BLOCKS[name][0]()).double()
        check_beside_plain(net, WAYS["processes"], make_image())
        return found.count("attend")


def expect_calls(name: str, processes: int) -> int | bool:
    """Return how often attention is ours in each process; of blocks, and on three processes, whether it is at all."""
    if name in HEADS and processes == 2:
        _, trained, evaluated = HEADS[name]
        return 3 * trained + 4 * evaluated
    return BLOCKS[name][1] if processes == 2 else name not in MOVED


TWO = ["like SwinUNETR", "like UNETR", "reshaped", "twice", "seen behind", "a query changed", "checkpointed"]
"""Heads that send, save or change what processes must agree on; slabs of one process take the others' way, too."""

THREE = ["like SwinUNETR", "like UNETR", "tokens", "crossed"]


@pytest.mark.parametrize(
    ("name", "processes"), [*((name, 2) for name in (*TWO, *BLOCKS)), *((name, 3) for name in THREE)]
)
def test_processes_are_exact(name: str, processes: int) -> None:
    expected = expect_calls(name, processes)
    counts = in_group(processes, compare_in_process, name)
    assert [type(expected)(count) for count in counts] == [expected] * processes


@pytest.mark.parametrize("way", ["fast", "two"])
@pytest.mark.parametrize("name", ["windows", "shifted windows", "tokens", "crossed"])
def test_under_autocast_scores_keep_their_digits(name: str, way: str, calls: list[str]) -> None:
    """In bfloat16 each of our gradients is as close to float64 as the plain network's."""
    torch.manual_seed(0)
    exact = BLOCKS[name][0]()
    ours, plain = measure_rounding(exact, make_image(torch.float32).requires_grad_(), WAYS[way], None)
    assert sorted(calls) == sorted(["attend", "differentiate"] * SEVERAL.get(way, 1))
    assert_no_coarser(ours, plain)


@pytest.mark.parametrize("way", ["fast", "two"])
def test_what_a_step_reads_is_watched(way: str, calls: list[str]) -> None:
    def change_bias(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = net.bias * 1.0
        scores = q @ k.mT + bias
        with torch.no_grad():
            bias.mul_(2.0)
        return scores.softmax(-1) @ v

    def read_late(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 1.0
        scores = q @ k.mT
        found = scores.softmax(-1) @ v
        with torch.no_grad():
            q.mul_(2.0)
        return found * scores.mean()

    def change_query(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 1.0
        found = (q @ k.mT).softmax(-1) @ v
        with torch.no_grad():
            q.mul_(2.0)
        return found

    def change_key(net: Net | None, q: Tensor, k: Any, v: Tensor) -> Tensor:
        k = k * 1.0
        scores = q @ k.mT
        for slab in k.slabs:
            slab.detach().mul_(2.0)
        return scores.softmax(-1) @ v

    class Gathered(Tokens):
        """Keys that are gathered where the tokens are cut."""

        def forward(self, image: Tensor) -> Tensor:
            x = self.first(image).flatten(2).transpose(1, 2)
            return change_key(None, x, x * 1.0, x)

    image = make_image()
    for net in (Net(change_bias), Net(read_late), Net(change_key), Gathered()):
        with pytest.raises(UnsupportedOperatorError, match="a bias or a mask of attention were changed in place"):
            WAYS[way](net.double())(image)
    net = WAYS[way](Net(change_query).double())
    with pytest.raises(UnsupportedOperatorError, match="was changed in place after"):
        net(image).mean().backward()


def test_gradients_past_a_step_are_refused(calls: list[str]) -> None:
    def ask(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        found = scores.softmax(-1) @ v
        scores.register_hook(lambda gradient: gradient)
        return found

    image = make_image()
    with pytest.raises(UnsupportedOperatorError, match="its gradient is not computed"):
        FastKernels(Net(ask).double(), "cpu")(image)


@pytest.mark.parametrize("way", ["fast", "two"])
def test_scores_take_no_memory(way: str, calls: list[str]) -> None:
    """Nothing of a matrix of scores is allocated, or saved for the backward pass."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    net = WAYS[way](Net(like_swin).double())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(make_image())
    slabs = SEVERAL.get(way, 1)
    assert calls == ["attend"] * slabs
    sizes = {tuple(tensor.shape) for tensor in saved}
    assert (3, 12, 12) in {size[-3:] for size in sizes}  # the bias
    assert (8 // slabs, 3, 12, 12) not in sizes


@pytest.mark.parametrize(("name", "messages"), [("windows", 0), ("tokens", 2), ("crossed, other values", 2)])
def test_keys_and_values_are_sent_once(name: str, messages: int, calls: list[str]) -> None:
    """And windows not at all."""
    gathered: list[int] = []
    move = LocalDevices.move

    def noted(self: LocalDevices, slabs: Sequence[Tensor], plan: Fetch) -> list[Tensor]:
        if list(plan.wanted) == [(0, plan.size)] * 2:
            gathered.append(plan.dim)
        return move(self, slabs, plan)

    with patch.object(LocalDevices, "move", noted):
        WAYS["two"](BLOCKS[name][0]().double())(make_image())
    assert calls == ["attend"] * 2
    assert len(gathered) == messages


def test_broken_numbers_stay_so(calls: list[str]) -> None:
    torch.manual_seed(0)
    plain = Net(like_swin).double()
    plain.mask[1, 3] = -torch.inf
    ours = FastKernels(copy.deepcopy(plain), "cpu")
    image = make_image()
    assert ours(image).isnan().equal(plain(image).isnan())
    assert plain(image).isnan().any()
    with torch.no_grad():
        plain.mask[1, 3] = 0.0
        image[0, 0, 0, 0, 0] = torch.nan
    assert FastKernels(copy.deepcopy(plain), "cpu")(image).isnan().equal(plain(image).isnan())
    assert calls
