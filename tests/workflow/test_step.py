"""One process that computes several replicas in turn trains as without them, or refuses."""

import copy

import pytest
import torch
from monai.losses import DiceCELoss
from torch import nn

from volseg.errors import BatchFieldError, ConfigError
from volseg.parallel import DataParallel, join_mesh
from volseg.workflow import Named, Training


class Batches:
    """Four batches of five samples."""

    batch_size = 5

    def __init__(self, num_rows=5):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(4, num_rows, 1, 4, 4, 4, generator=generator, dtype=torch.float64)
        self.batches = [{"image": image, "label": (image > 0).long()} for image in images]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def cross_entropy(logits, label):
    return nn.functional.cross_entropy(logits, label[:, 0])


def train(network, batches, loss=cross_entropy, **options):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    named = Named(loss, ["logits", "label"], ["loss"])
    training = Training(Named(network, ["image"], ["logits"]), named, optimizer, batches, epochs=2, **options)
    training.run()
    return training


@pytest.fixture
def network():
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.ReLU(), nn.Conv3d(4, 2, 1)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"clip": 0.01}, {"accumulate": 3}], ids=["", "clipped", "accumulated"])
def test_replicas_of_one_process_train_as_one(count, options, network):
    plain, shared = copy.deepcopy(network), DataParallel(network, join_mesh().replicas(count))
    expected, found = (train(model, Batches(), **options) for model in (plain, shared))
    # Means over five samples in another order of additions, in float64.
    torch.testing.assert_close(shared.state_dict(), plain.state_dict(), rtol=1e-11, atol=1e-13)
    for mine, theirs in zip(found.history, expected.history, strict=True):
        assert mine.losses["loss"] == pytest.approx(theirs.losses["loss"], rel=1e-6)  # kept in float32


def test_a_batch_must_hold_the_rows_of_the_own_replicas(network):
    with pytest.raises(BatchFieldError, match=r"computes 5 of a batch's 5 samples, but .* 'image' has the shape \(4,"):
        train(DataParallel(network, join_mesh().replicas(2)), Batches(num_rows=4))


def test_batches_must_say_how_many_samples_the_whole_batch_has(network):
    with pytest.raises(ConfigError, match="2 replicas share each batch, but the batches do not state its size"):
        train(DataParallel(network, join_mesh().replicas(2)), list(Batches()))


@pytest.mark.parametrize("options", [{"batch": True}, {"weight": torch.tensor([1.0, 9.0]).double()}], ids=str)
def test_a_loss_that_is_no_mean_over_samples_is_refused_without_a_config_too(options, network):
    """Each replica's Dice over its own samples is another loss than the Dice over the batch."""
    mixed = DiceCELoss(softmax=True, to_onehot_y=True, **options)
    with pytest.raises(ConfigError, match="is not a mean over the samples of a batch"):
        train(DataParallel(network, join_mesh().replicas(2)), Batches(), loss=mixed)
