"""The numbers of a training beside its loss: soft Dice of the foreground, gradient norm, speed."""

import copy
import logging

import pytest
import torch
from in_group import in_group
from torch import nn

from volseg import ModelParallel, Named, Training
from volseg.checkpointing.file import copy_to_host
from volseg.losses import DiceCELoss, Targets
from volseg.losses.dice_cross_entropy import compute_soft_dice
from volseg.monitoring.progress import Progress
from volseg.monitoring.training_log import list_scalars
from volseg.parallel import Pipeline, Spatial
from volseg.parallel.data_parallel import DataParallel
from volseg.parallel.replicas import join_mesh
from volseg.workflow.components import build_loss
from volseg.workflow.named import Objective

FUSED = {"softmax": True, "to_onehot_y": True}
PLAIN = Targets(num_classes=3)


def make_network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, outputs, 1))


def make_batches(count=3, samples=2, classes=3):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "image": torch.randn(samples, 1, 8, 6, 4, generator=generator),
            "label": torch.randint(classes, (samples, 1, 8, 6, 4), generator=generator).to(torch.uint8),
        }
        for _ in range(count)
    ]


def train(network, losses=None, batches=None, **settings):
    losses = Objective(losses or DiceCELoss(**FUSED)).losses
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    return Training(network, losses, optimizer, batches or make_batches(), epochs=1, **settings)


def expect(network, batches, classes=(1, 2)):
    """Return the mean over classes of Dice over all voxels of all batches, by the formula."""
    shares, labels = [], []
    for batch in batches:
        with torch.no_grad():
            shares.append(network(batch["image"]).double().softmax(1).transpose(0, 1).flatten(1))
        labels.append(batch["label"].flatten())
    p, label = torch.cat(shares, 1), torch.cat(labels)
    found = []
    for index in classes:
        hit = (label == index).double()
        if hit.any():
            found.append(2 * (p[index] * hit).sum() / (p[index].sum() + hit.sum()))
    return float(torch.stack(found).mean())


def measure_norms(batches, loss, accumulate):
    """Return the norms of the mean gradients of groups of batches."""
    norms = []
    for start in range(0, len(batches), accumulate):
        network, group = make_network(), batches[start : start + accumulate]
        for batch in group:
            (loss(network(batch["image"]), batch["label"]) / len(group)).backward()
        norms.append(nn.utils.get_total_norm([parameter.grad for parameter in network.parameters()]).item())
    return norms


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (None, {}),
        (None, {"accumulate": 2, "clip": 1e-3}),
        (Spatial(axes="D"), {"clip": 1e-3}),
        (Pipeline(split_size=1, cuts=["2"]), {"clip": 12.0}),
    ],
    ids=["one", "gathered", "spatial", "pipeline"],
)
@pytest.mark.parametrize("include_background", [True, False])
def test_they_are_of_all_voxels_and_steps_of_the_epoch_on_any_devices(strategy, settings, include_background, caplog):
    """The norm is that before clipping; both numbers are printed and logged."""
    batches = make_batches()
    expected = expect(make_network(), batches)
    loss = DiceCELoss(**FUSED, include_background=include_background)
    norms = measure_norms(batches, loss, settings.get("accumulate", 1))
    model = make_network()
    model = model if strategy is None else ModelParallel(model, strategy=strategy, devices=["cpu", "cpu"])
    with caplog.at_level(logging.INFO):
        record = train(model, loss, hooks=Progress(), **settings).run()[0]
    assert record.soft_dice == pytest.approx(expected, rel=1e-6)
    assert record.gradient_norm == pytest.approx(sum(norms) / len(norms), rel=1e-5)
    assert record.batches == 3
    assert record.voxels_per_second == pytest.approx(3 * 2 * 8 * 6 * 4 / record.seconds)
    assert list_scalars(record)["train/soft_dice"] == record.soft_dice
    assert f"loss {record.losses['loss']:.4f}, soft Dice {record.soft_dice:.4f}" in caplog.text


def test_a_class_that_no_label_holds_is_left_out():
    batches = make_batches(classes=2)
    expected = expect(make_network(), batches)
    assert expected == expect(make_network(), batches, classes=(1,))
    assert train(make_network(), batches=batches).run()[0].soft_dice == pytest.approx(expected, rel=1e-6)
    empty = [{**batch, "label": torch.zeros_like(batch["label"])} for batch in batches]
    assert train(make_network(), batches=empty).run()[0].soft_dice is None


def on_replicas(data, spatial, count):
    batches = make_batches(samples=5)
    mesh = join_mesh(data, spatial)
    network = make_network()
    if spatial > 1:
        network = ModelParallel(network, strategy=Spatial(), mesh=mesh.spatial_group)
    model = DataParallel(network, mesh.replicas(count))
    dealt = model.replicas.deal(5)
    rows = [row for replica in model.replicas.own for row in range(5)[dealt[replica]]]
    own = Rows([{name: value[rows] for name, value in batch.items()} for batch in batches], 5)
    return train(model, batches=own).run()[0].soft_dice


@pytest.mark.parametrize(("data", "spatial", "count"), [(2, 1, 2), (2, 1, 4), (2, 2, 2)])
def test_it_is_of_all_replicas(data, spatial, count):
    """Five samples are divided unevenly, so a mean of the replicas' Dice would differ."""
    expected = expect(make_network(), make_batches(samples=5))
    assert in_group(data * spatial, on_replicas, data, spatial, count) == pytest.approx(
        [expected] * (data * spatial), rel=1e-6
    )


class Rows(list):
    def __init__(self, batches, batch_size):
        super().__init__(batches)
        self.batch_size = batch_size


def test_beside_another_loss_it_is_found_where_label_maps_are_known():
    network, batch = make_network(), make_batches(1)[0]
    fields = {**batch, "logits": network(batch["image"])}
    own = build_loss({"name": "TverskyLoss"}, inputs=["logits", "label"], output="loss")
    heads = [fields["logits"], -fields["logits"][..., ::2, ::2, ::2]]  # of deep supervision the finest counts
    fused = build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss", targets=PLAIN)
    for loss, logits in ((own, fields["logits"]), (own, heads), (fused, heads)):
        _, sums = Objective(loss, targets=PLAIN).compute({**fields, "logits": logits})
        assert compute_soft_dice(sums) == pytest.approx(expect(network, [batch]), rel=1e-6)
        assert not sums.requires_grad
    for other in (
        {"label": batch["label"].float() / 2},  # of which a voxel may be half
        {"label": batch["label"].expand(-1, 3, -1, -1, -1)},
        {"logits": fields["logits"][:, :2]},
    ):
        wrong = Named(lambda logits, label: logits.mean() + label.sum() * 0, ["logits", "label"], ["loss"])
        assert Objective(wrong, targets=PLAIN).compute({**fields, **other})[1] is None
    assert Objective(own).compute(fields)[1] is None  # nobody says what the labels mean


def test_of_regions_each_is_one_and_what_nobody_annotated_is_left_out():
    targets = Targets(num_classes=3, regions=((1, 2), (2,)), ignores=True)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 2, 4, 4, 4, generator=generator)
    label = torch.randint(4, (2, 1, 4, 4, 4), generator=generator).to(torch.uint8)
    p, known = logits.double().sigmoid(), label[:, 0] != 3
    found = []
    for place, region in enumerate(targets.regions):
        hit = torch.isin(label[:, 0], torch.tensor(region)).double() * known
        found.append(2 * (p[:, place] * hit).sum() / ((p[:, place] * known).sum() + hit.sum()))
    loss = DiceCELoss(**FUSED).take_targets(targets)
    for objective in (Objective(loss), Objective(lambda logits, label: logits.mean(), targets=targets)):
        _, sums = objective.compute({"logits": logits, "label": label})
        assert compute_soft_dice(sums) == pytest.approx(float(torch.stack(found).mean()), rel=1e-6)


def test_an_epoch_that_goes_on_has_the_batches_before():
    expected = train(make_network()).run()[0].soft_dice
    first, second = train(make_network()), train(make_network())

    def stop(batch):
        if first.position == 2:
            raise InterruptedError
        return original(batch)

    original, first._train_batch = first._train_batch, stop
    with pytest.raises(InterruptedError):
        first.run()
    second.load_state_dict(copy.deepcopy(copy_to_host(first.state(), {}).as_checkpoint()))
    assert second.run()[0].soft_dice == expected


@pytest.mark.gpu
def test_a_recorded_step_finds_it_in_each_batch():
    batches = make_batches(2) * 6
    expected = expect(make_network(), batches)
    network = make_network().cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, fused=True)
    training = Training(network, DiceCELoss(**FUSED), optimizer, batches, epochs=1, precision="fp32")
    record = training.run()[0]
    assert training.step.recorded is not None
    assert record.soft_dice == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
def test_a_recorded_step_gives_the_norm_of_each_batch():
    batches = make_batches()
    expected = measure_norms(batches[:1], DiceCELoss(**FUSED), 1)
    network = make_network().cuda()
    optimizer, loss = torch.optim.SGD(network.parameters(), lr=0.0, fused=True), DiceCELoss(**FUSED)
    training = Training(network, loss, optimizer, batches[:2] * 5, epochs=1, precision="fp32", clip=12.0)
    step, norms = training.step, []
    training.step = Noted(step, norms)
    training.run()
    assert step.recorded is not None
    assert [norm.item() for norm in norms][0::2] == pytest.approx(expected * 5, rel=1e-4)
    assert norms[1].item() != pytest.approx(expected[0], rel=1e-3)


class Noted:
    def __init__(self, step, norms):
        self._step, self._norms = step, norms

    def __call__(self, *args, **named):
        losses = self._step(*args, **named)
        self._norms.append(self._step.gradient_norm)
        return losses

    def __getattr__(self, name):
        return getattr(self._step, name)
