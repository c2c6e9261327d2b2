"""What a user of PyTorch tries first: bare networks and losses, and what is told where that is not enough."""

import pytest
import torch
from monai.data import MetaTensor
from monai.losses import DiceCELoss
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
        ({"network": nn.Conv3d}, ConfigError, "a module that takes image and gives logits.* got <class"),
        ({"loss": "dice"}, ConfigError, "a module that takes logits, label and gives loss.* got 'dice'"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, BatchFieldError, r"gave loss of shape \(2, 4, 4, 4\).*mean"),
        ({"batches": [tuple(BATCH.values())]}, BatchFieldError, "a batch is a dict of fields such as .* got a tuple"),
        ({"batches": iter([BATCH])}, ConfigError, "batches need a length, .* got a list_iterator; pass a DataLoader"),
        ({"batches": []}, ConfigError, "batches are empty"),
        ({"batches": [{"x": BATCH["image"]}]}, BatchFieldError, r"Conv3d needs \['image'\], but the batch has \['x'\]"),
    ],
)
def test_what_cannot_be_trained_is_told(arguments, kind, message):
    with pytest.raises(kind, match=message):
        train(**arguments)


class Ends(nn.Module):
    """A network whose output is what a function makes of its logits."""

    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Conv3d(1, 2, 1), end

    def forward(self, image):
        return self.end(self.layer(image))


@pytest.mark.parametrize("loss", [DiceCELoss(to_onehot_y=True, softmax=True), squeezed_cross_entropy])
@pytest.mark.parametrize(
    ("end", "label", "message"),
    [
        (
            nn.Identity(),
            LABEL.index_fill(0, torch.tensor([1]), 7),
            r"label holds 7 in case b, where .* for 0 to 1; cor",
        ),
        (nn.Identity(), LABEL - 1, "label holds -1 in case a, b, where logits has outputs for 0 to 1"),
        (nn.MaxPool3d(2), LABEL, r"logits = \(2, 2, 2, 2, 2\) and label = \(2, 1, 4, 4, 4\) of case a, b: .* same sam"),
        (nn.Identity(), LABEL[:1], r"label = \(1, 1, 4, 4, 4\) of case a, b: they need the same samples and sides"),
        (
            lambda logits: [logits, logits[..., :2]],
            LABEL,
            r"logits = a list of \(2, 2, 4, 4, 4\), .* must give one tensor",
        ),
        (
            lambda logits: {"out": logits},
            LABEL,
            "logits = a dict of out and label = .* must give one tensor; return one",
        ),
    ],
)
def test_a_label_or_an_output_that_does_not_fit_is_told_with_case_values_and_shapes(end, label, message, loss):
    with pytest.raises(BatchFieldError, match=message) as raised:
        train(Ends(end), loss, [{"image": BATCH["image"], "label": label, "case": ["a", "b"]}])
    assert type(raised.value.__cause__).__name__ in str(raised.value)


def test_other_faults_of_networks_and_losses_stay_what_they_are_and_name_the_batch():
    with pytest.raises(RuntimeError, match="expected input") as raised:
        train(batches=[BATCH, {**BATCH, "image": torch.ones(2, 3, 4, 4, 4)}])
    assert raised.value.__notes__ == [
        "in epoch 1, batch 2, of image (2, 3, 4, 4, 4), label (2, 4, 4, 4); cases: unknown"
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
    with pytest.raises(ConfigError, match=r"got Named; of a Named network pass its module"):
        Predictor(model=Named(network, ["image"], ["logits"]), num_classes=2)
    predict = Predictor(model=network, num_classes=2)
    with pytest.raises(BatchFieldError, match=r"as volseg.read_volume gives it .*, got a Tensor"):
        predict({"image": torch.zeros(1, 4, 4, 4)})
    assert predict({"image": MetaTensor(torch.zeros(1, 4, 4, 4))}).shape == (1, 4, 4, 4)
