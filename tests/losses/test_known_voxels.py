"""The loss of partial annotations against nnU-Net's and MONAI's formulas: values and gradients in float64."""

import math
from typing import Any

import monai.losses
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.errors import ConfigError, DataError
from volseg.losses import DiceCELoss, Targets, Terms, known_dice_cross_entropy, known_voxels
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import from_whole

SIZE = (8, 6, 4)
REGIONS = ((1, 2, 3), (1, 3), (3,))
IGNORED = 4
EPS = 1e-5
EXACT = {"rtol": 1e-11, "atol": 1e-14}

TERMS = [
    Terms(),
    Terms(0.3, 2.0, include_background=False, batch=True, squared=True, jaccard=True, smooth_nr=0.2, smooth_dr=0.4),
]
TARGETS = {
    "ignored": Targets(num_classes=4, ignores=True),
    "regions": Targets(num_classes=4, regions=REGIONS),
    "regions, ignored": Targets(num_classes=4, regions=REGIONS, ignores=True),
    "partial": Targets(num_classes=4, hidden=((0, 2, 3), (0, 1))),
    "partial, ignored": Targets(num_classes=4, ignores=True, hidden=((0, 2, 3), (0, 1))),
    "partial regions, ignored": Targets(num_classes=4, regions=REGIONS, ignores=True, hidden=((0, 1), (0, 2))),
}


def make_logits(targets: Targets, batch: int = 2) -> Tensor:
    return (2 * torch.randn(batch, targets.num_outputs, *SIZE, dtype=torch.float64)).requires_grad_()


def make_label(targets: Targets, batch: int = 2) -> Tensor:
    """Label maps of cases as they are: at most one number of hidden classes in each."""
    label = torch.randint(0, targets.num_classes + int(targets.ignores), (batch, 1, *SIZE))
    for sample in range(batch):
        if targets.hidden:
            place = sample % len(targets.hidden)
            among = torch.isin(label[sample], torch.tensor(targets.hidden[place]))
            label[sample][among] = targets.first_hidden + place
    return label.to(torch.uint8)


def draw(name: str, batch: int = 2) -> tuple[Targets, Tensor, Tensor]:
    """Return a task's targets, logits and label maps."""
    return TARGETS[name], make_logits(TARGETS[name], batch), make_label(TARGETS[name], batch)


def assert_same(ours: Tensor, theirs: Tensor, logits: Tensor, **close: Any) -> None:
    torch.testing.assert_close(ours, theirs, **(close or EXACT))
    gradients = [torch.autograd.grad(3 * loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, **(close or EXACT))


def dice(probabilities: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """nnU-Net's soft Dice with ``loss_mask`` as a loss, per sample and column, smoothed as MONAI does."""
    sums = [(volume * mask).sum((2, 3, 4)) for volume in (probabilities * truth, probabilities, truth)]
    return 1 - (2 * sums[0] + EPS) / (sums[1] + sums[2] + EPS)


def one_hot(label: Tensor, classes: int) -> Tensor:
    return torch.stack([label[:, 0] == index for index in range(classes)], 1).double()


def test_ignored_voxels_are_masked_as_in_nnunet() -> None:
    """``DC_and_CE_loss`` of nnU-Net 2.8.1 per sample; its cross entropy is torch's with ``ignore_index``."""
    targets, logits, label = draw("ignored")
    mask = (label != IGNORED).double()
    entropy = [F.cross_entropy(x[None], y.long(), ignore_index=IGNORED) for x, y in zip(logits, label, strict=True)]
    expected = dice(logits.softmax(1), one_hot(label, 4), mask).mean() + torch.stack(entropy).mean()
    assert_same(known_dice_cross_entropy(logits, label, targets, Terms()), expected, logits)


@pytest.mark.parametrize("name", ["regions", "regions, ignored"])
def test_regions_are_nnunets(name: str) -> None:
    """``DC_and_BCE_loss`` of nnU-Net 2.8.1; of its binary cross entropy the mean over regions with a mask, too."""
    targets, logits, label = draw(name)
    mask = (label != IGNORED).double()
    truth = torch.stack([torch.isin(label[:, 0], torch.tensor(region)) for region in REGIONS], 1).double()
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none") * mask
    per_sample = entropy.sum((1, 2, 3, 4)) / (len(REGIONS) * mask.sum((1, 2, 3, 4)))
    expected = dice(logits.sigmoid(), truth, mask).mean() + per_sample.mean()
    assert_same(known_dice_cross_entropy(logits, label, targets, Terms()), expected, logits)


@pytest.mark.parametrize("name", ["ignored", "partial", "partial, ignored"])
@pytest.mark.parametrize("terms", TERMS, ids=["plain", "everything"])
def test_without_anything_unknown_it_is_monais(name: str, terms: Terms) -> None:
    logits = make_logits(TARGETS[name])
    label = torch.randint(0, 4, (2, 1, *SIZE), dtype=torch.uint8)
    parameters = {"softmax": True, "to_onehot_y": True, "include_background": terms.include_background}
    parameters |= {"batch": terms.batch, "squared_pred": terms.squared, "jaccard": terms.jaccard}
    parameters |= {"smooth_nr": terms.smooth_nr, "smooth_dr": terms.smooth_dr}
    theirs = monai.losses.DiceCELoss(**parameters, lambda_dice=terms.dice, lambda_ce=terms.cross_entropy)
    # MONAI takes the norm of the one-hot label, which is float32 whatever the logits are, where it squares.
    close = {"rtol": 1e-7, "atol": 1e-9} if terms.squared else EXACT
    assert_same(known_dice_cross_entropy(logits, label, TARGETS[name], terms), theirs(logits, label), logits, **close)


def test_regions_of_single_classes_are_monais_dice_with_a_sigmoid() -> None:
    targets = Targets(num_classes=4, regions=((1,), (2,), (3,)))
    logits, label = make_logits(targets), make_label(targets)
    truth = one_hot(label, 4)[:, 1:]
    expected = monai.losses.DiceLoss(sigmoid=True)(logits, truth) + F.binary_cross_entropy_with_logits(logits, truth)
    assert_same(known_dice_cross_entropy(logits, label, targets, Terms()), expected, logits)


def test_hidden_classes_are_merged_with_the_background() -> None:
    """The marginal losses of Shi et al.: the plain loss of logits that were merged by ``logsumexp``."""
    hidden = (0, 2, 3)
    targets = Targets(num_classes=4, hidden=(hidden,))
    logits = make_logits(targets, 1)
    label = torch.randint(0, 2, (1, 1, *SIZE)).to(torch.uint8)  # 1, or what nobody looked for
    merged = torch.stack([logits[:, list(hidden)].logsumexp(1), logits[:, 1]], 1)
    expected = monai.losses.DiceCELoss(softmax=True, to_onehot_y=True)(merged, label)
    marked = torch.where(label == 0, 4, 1).to(torch.uint8)
    assert_same(known_dice_cross_entropy(logits, marked, targets, Terms()), expected, logits)
    without = monai.losses.DiceCELoss(softmax=True, to_onehot_y=True, include_background=False)(merged, label)
    assert_same(known_dice_cross_entropy(logits, marked, targets, Terms(include_background=False)), without, logits)


def test_a_fully_labelled_sample_keeps_its_loss_beside_a_partial_one() -> None:
    targets, logits, label = draw("partial")
    label[1] = torch.randint(0, 4, (1, *SIZE))
    plain = monai.losses.DiceCELoss(softmax=True, to_onehot_y=True)(logits[1:], label[1:])
    alone = known_dice_cross_entropy(logits[:1], label[:1], targets, Terms())
    assert_same(known_dice_cross_entropy(logits, label, targets, Terms()), (plain + alone) / 2, logits)


def test_a_region_that_may_be_hidden_has_no_loss() -> None:
    """Only class 3 is labelled, so the background may contain regions of other classes."""
    targets = Targets(num_classes=4, regions=REGIONS, hidden=((0, 1, 2),))
    logits = make_logits(targets, 1)
    label = torch.where(torch.rand(1, 1, *SIZE) < 0.3, 3, 4).to(torch.uint8)
    alone = Targets(num_classes=2, regions=((1,),))
    expected = known_dice_cross_entropy(logits[:, 2:], (label == 3).to(torch.uint8), alone, Terms())
    loss = known_dice_cross_entropy(logits, label, targets, Terms())
    assert_same(loss, expected, logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[:, :2].any()


@pytest.mark.parametrize("terms", TERMS, ids=["plain", "everything"])
@pytest.mark.parametrize("name", TARGETS)
def test_gradients_are_the_derivatives(name: str, terms: Terms) -> None:
    targets = TARGETS[name]
    logits = make_logits(targets)[..., :2, :2, :3].detach().requires_grad_()
    label = make_label(targets)[..., :2, :2, :3]
    assert torch.autograd.gradcheck(
        lambda x: known_dice_cross_entropy(x, label, targets, terms), logits, fast_mode=True
    )


@pytest.mark.parametrize("name", [name for name in TARGETS if "ignored" in name])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_ignored_voxels_have_no_gradient(name: str, dtype: torch.dtype) -> None:
    targets = TARGETS[name]
    logits, label = make_logits(targets).detach().to(dtype).requires_grad_(), make_label(targets)
    known_dice_cross_entropy(logits, label, targets, Terms(squared=True)).backward()
    assert logits.grad is not None
    ignored = (label == IGNORED).expand_as(logits)
    assert not logits.grad[ignored].any()
    assert logits.grad[~ignored].abs().sum() > 0


@pytest.mark.parametrize("terms", TERMS, ids=["plain", "everything"])
@pytest.mark.parametrize("name", [name for name in TARGETS if "ignored" in name])
def test_a_sample_that_nobody_annotated_counts_as_nothing(name: str, terms: Terms) -> None:
    targets, logits, label = draw(name)
    label[1] = IGNORED
    nothing = known_dice_cross_entropy(logits[1:], label[1:], targets, terms)
    assert nothing.item() == 0
    both = known_dice_cross_entropy(logits, label, targets, terms)
    assert math.isfinite(both.item())
    (gradient,) = torch.autograd.grad(both, logits)
    assert gradient.isfinite().all()
    assert not gradient[1].any()


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_a_mean_over_samples(name: str) -> None:
    targets, logits, label = draw(name, 5)
    label[0][label[0] == 2] = 1
    label[3] = 3
    whole = known_dice_cross_entropy(logits, label, targets, Terms())
    parts = [known_dice_cross_entropy(logits[rows], label[rows], targets, Terms()) for rows in (slice(2), slice(2, 5))]
    torch.testing.assert_close(whole, (2 * parts[0] + 3 * parts[1]) / 5, **EXACT)


@pytest.mark.parametrize("name", TARGETS)
def test_channels_last_and_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets, logits, label = draw(name)
    expected = known_dice_cross_entropy(logits, label, targets, Terms())
    last = logits.contiguous(memory_format=torch.channels_last_3d)
    assert_same(known_dice_cross_entropy(last, label, targets, Terms()), expected, logits)
    monkeypatch.setattr(known_voxels, "ELEMENTS", 7 * 50)
    assert_same(known_dice_cross_entropy(logits, label, targets, Terms()), expected, logits)


def test_half_precision_is_summed_in_float32() -> None:
    targets = TARGETS["regions, ignored"]
    half, label = make_logits(targets).detach().bfloat16(), make_label(targets)
    loss = known_dice_cross_entropy(half, label, targets, Terms())
    assert loss.dtype == torch.float32
    exact = known_dice_cross_entropy(half.double(), label, targets, Terms())
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)  # float32 sums of 192


@pytest.mark.parametrize("sharded_label", [False, True], ids=["whole label", "sharded label"])
@pytest.mark.parametrize(("dims", "grid"), [((2,), (2,)), ((2,), (3,)), ((2, 3), (2, 2))], ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=["plain", "everything"])
@pytest.mark.parametrize("name", TARGETS)
def test_loss_of_slabs_equals_loss_of_the_volume(name, terms, dims, grid, sharded_label):
    """The voxels that exclude a column may be on another shard."""
    targets, logits, label = draw(name)
    if targets.hidden:
        label[:, :, :4] = 3
    context = Context(LocalDevices(["cpu"] * math.prod(grid), grid))
    expected = known_dice_cross_entropy(logits, label, targets, terms)
    given = from_whole(label, dims, context) if sharded_label else label
    actual = known_dice_cross_entropy(from_whole(logits, dims, context), given, targets, terms)
    assert type(actual) is Tensor
    assert_same(actual, expected, logits)


def test_a_coarser_head_reads_the_label_at_its_own_voxels() -> None:
    targets = TARGETS["ignored"]
    label = make_label(targets)
    head = torch.randn(2, 4, 4, 3, 2, dtype=torch.float64).requires_grad_()
    coarse = label[:, :, 1::2, 1::2, 1::2]
    expected = known_dice_cross_entropy(head, coarse, targets, Terms())
    assert_same(known_dice_cross_entropy(head, label, targets, Terms()), expected, head)
    context = Context(LocalDevices(["cpu"] * 2))
    for given in (label, from_whole(label, (2,), context)):
        sharded = known_dice_cross_entropy(from_whole(head, (2,), context), given, targets, Terms())
        assert_same(sharded, expected, head)


@pytest.mark.parametrize(("name", "strange"), [("ignored", 5), ("regions", 4), ("partial", 6), ("partial, ignored", 7)])
def test_a_number_that_means_nothing_is_refused(name: str, strange: int) -> None:
    targets = TARGETS[name]
    label = make_label(targets)
    label[0, 0, 0, 0, 0] = strange
    with pytest.raises(DataError, match=r"but has others in 1 voxel\(s\)"):
        known_dice_cross_entropy(make_logits(targets), label, targets, Terms())


def test_logits_of_another_task_are_refused() -> None:
    _, logits, label = draw("ignored")
    with pytest.raises(DataError, match=r"needed: logits \(B, 3, D, H, W\) with one channel per region"):
        known_dice_cross_entropy(logits, label, TARGETS["regions"], Terms())


@pytest.mark.parametrize(
    "parameters", [{"weight": torch.ones(4)}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"softmax": False}]
)
def test_parameters_that_only_monai_knows_are_refused(parameters: dict[str, Any]) -> None:
    loss = DiceCELoss(**{"softmax": True, "to_onehot_y": True, **parameters})
    with pytest.raises(ConfigError, match="supports no class weights"):
        loss.take_targets(TARGETS["ignored"])
    plain = DiceCELoss(softmax=True, to_onehot_y=True).take_targets(Targets(num_classes=4))
    assert plain.targets is None  # it keeps the single pass


@pytest.mark.gpu
@pytest.mark.parametrize("name", TARGETS)
def test_on_a_gpu_it_is_the_same_and_can_be_recorded(name: str) -> None:
    targets = TARGETS[name]
    logits, label = make_logits(targets).detach().float(), make_label(targets)
    expected = known_dice_cross_entropy(logits.requires_grad_(), label, targets, Terms())
    (wanted,) = torch.autograd.grad(expected, logits)
    given, on_gpu = torch.zeros_like(logits, device="cuda").requires_grad_(), label.cuda()

    def step() -> tuple[Tensor, Tensor]:
        loss = known_dice_cross_entropy(given, on_gpu, targets, Terms())
        return loss, torch.autograd.grad(loss, given)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # makes the tables
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradient = step()
    given.data.copy_(logits)
    graph.replay()
    torch.testing.assert_close(loss.cpu(), expected.detach(), rtol=1e-5, atol=0)  # float32 sums of 192
    torch.testing.assert_close(gradient.cpu(), wanted, rtol=1e-4, atol=1e-8)


@pytest.mark.gpu
def test_on_a_gpu_a_number_that_means_nothing_makes_the_loss_nan() -> None:
    targets = TARGETS["ignored"]
    label = make_label(targets)
    label[0, 0, 0, 0, 0] = 200
    assert known_dice_cross_entropy(make_logits(targets).cuda(), label.cuda(), targets, Terms()).isnan()
