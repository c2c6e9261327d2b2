"""The first attempts of a PyTorch user: bare networks and losses, and the errors if that is not enough."""

import pytest
import torch
from monai.data import MetaTensor
from torch import nn

from volseg import ModelParallel, Named, Patience, Predictor, Testing, Training, Validation
from volseg.errors import BatchFieldError, ConfigError

BATCH = {"image": torch.ones(2, 1, 4, 4, 4), "label": torch.zeros(2, 4, 4, 4).long()}
LABEL = torch.zeros(2, 1, 4, 4, 4).long()


def squeezed_cross_entropy(logits, label):
    return nn.functional.cross_entropy(logits, label[:, 0])


def train(network=None, loss=nn.functional.cross_entropy, batches=(BATCH,), **options):
    network = nn.Conv3d(1, 2, 1) if network is None else network
    weights = [*network.parameters()] if isinstance(network, nn.Module) else []
    optimizer = torch.optim.SGD(weights or [nn.Parameter(torch.zeros(1))], lr=0.1)
    return Training(network, loss, optimizer, batches, epochs=2, **options).run()


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu:1"]])
def test_a_bare_network_and_a_bare_loss_train_as_named_ones_do(devices):
    def make():
        torch.manual_seed(0)
        network = nn.Conv3d(1, 2, 1)
        return network if devices is None else ModelParallel(network, "spatial", devices=devices)

    named = train(
        Named(make(), inputs=["image"], outputs=["logits"]),
        Named(nn.functional.cross_entropy, inputs=["logits", "label"], outputs=["loss"]),
    )
    bare = train(make(), hooks=Patience(3))
    assert [record.losses for record in bare] == [record.losses for record in named]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"network": Named(abs, ["a"], ["b"])}, ConfigError, r"Training needs a Named nn\.Module, got a Named abs"),
        ({"network": nn.Conv3d}, ConfigError, "a module from image to logits.* got <class"),
        ({"loss": "dice"}, ConfigError, "a module from logits, label to loss.* got 'dice'"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, BatchFieldError, r"loss of shape \(2, 4, 4, 4\).*mean"),
        ({"batches": [tuple(BATCH.values())]}, BatchFieldError, "a batch must be a dict of fields .* got a tuple"),
        ({"batches": iter([BATCH])}, ConfigError, "batches need a length, .* got a list_iterator; pass a DataLoader"),
        ({"batches": []}, ConfigError, "batches are empty"),
        ({"batches": [{"x": BATCH["image"]}]}, BatchFieldError, r"Conv3d needs \['image'\], but the batch has \['x'\]"),
    ],
)
def test_what_cannot_be_trained_is_told(arguments, kind, message):
    with pytest.raises(kind, match=message):
        train(**arguments)


@pytest.mark.parametrize(
    ("label", "fault"), [(LABEL[:, 0] + 7, (IndexError, RuntimeError)), (LABEL[:1, 0], (ValueError, RuntimeError))]
)
def test_a_label_that_does_not_fit_is_told_with_its_shape_and_cases(label, fault):
    with pytest.raises(fault) as raised:
        train(batches=[{"image": BATCH["image"], "label": label, "case": ["a", "b"]}])
    (note,) = raised.value.__notes__
    assert note.endswith(f"label {tuple(label.shape)}; cases: a, b")


def test_other_faults_of_networks_and_losses_stay_what_they_are_and_name_the_batch():
    with pytest.raises(RuntimeError, match="expected input") as raised:
        train(batches=[BATCH, {**BATCH, "image": torch.ones(2, 3, 4, 4, 4)}])
    assert raised.value.__notes__ == [
        "in epoch 1, batch 2, with image (2, 3, 4, 4, 4), label (2, 4, 4, 4); cases: unknown"
    ]

    def broken(logits, label):
        return logits.means()

    with pytest.raises(AttributeError, match="means"):
        train(loss=broken)


@pytest.mark.parametrize(
    "make", [lambda net: Validation(net, [], {1: "a"}), lambda net: Testing(net, [], "predictions")]
)
def test_a_network_in_the_place_of_a_predictor_is_told(make):
    with pytest.raises(ConfigError, match=r"needs a Predictor, .* got a Conv3d; pass Predictor\(model=network"):
        make(nn.Conv3d(1, 2, 1))


def test_a_predictor_needs_a_network_and_volumes_that_know_their_place():
    network = nn.Conv3d(1, 2, 1)
    with pytest.raises(ConfigError, match=r"got Named; for a Named network, pass its module"):
        Predictor(model=Named(network, ["image"], ["logits"]), num_classes=2)
    predict = Predictor(model=network, num_classes=2)
    with pytest.raises(BatchFieldError, match=r"needs the affine .*, got a Tensor"):
        predict({"image": torch.zeros(1, 4, 4, 4)})
    assert predict({"image": MetaTensor(torch.zeros(1, 4, 4, 4))}).shape == (1, 4, 4, 4)
