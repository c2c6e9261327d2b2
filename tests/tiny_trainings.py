"""Trainings of a few steps, whose weights tests export and load again."""

from contextlib import contextmanager

import torch
import yaml
from torch import nn

from volseg.data.synthetic import make_task
from volseg.experiment import REGISTRIES, load_config, own_components
from volseg.workflow import Checkpoints, Hook, Named, Training

DYNUNET = (
    "network={name: DynUNet, kernel_size: [3, 3, 3], strides: [1, 2, 2], upsample_kernel_size: [2, 2], "
    "filters: [4, 8, 8]}"
)


class FirstWeights(Hook):
    """Keep the weights that a training starts with, and stop it."""

    def on_training_begin(self, training):
        self.weights = clone(training.network.state_dict())
        training.stop("seen")


@contextmanager
def as_a_new_process():
    """Let this process know, in the block, no component of one's own but those that it is given there."""
    before = {kind: registry.registered for kind, registry in REGISTRIES.items()}
    try:
        yield
    finally:
        own_components._files.clear()
        for kind, registry in REGISTRIES.items():
            for name in registry.registered - before[kind]:
                registry.forget(name)


def clone(state):
    """Return a copy of a ``state_dict`` of tensors."""
    return {name: value.clone() for name, value in state.items()}


def config_factory(folder):
    """Make a data set, and return a function from a run folder and settings to a config."""
    values = {
        "name": "tiny",
        "data": {"root": str(make_task(folder / "Task00_Synthetic", num_cases=2, num_test=1))},
        "preprocessing": [{"name": "Spacing", "spacing": [4.0, 4.0, 4.0]}, {"name": "ZScore"}],
        "split": {"num_folds": 2, "validation": "none"},
        "patch": {"size": [8, 8, 8], "batch": 2},
        "augmentation": {"enabled": False},
        "optimizer": {"name": "SGD", "lr": 0.3},
        "training": {"epochs": 1, "iterations": 3, "ema": 0.7},
        "logging": {"loggers": []},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return lambda output, *settings: load_config(file, [f"output={output}", *settings])


class Batches:
    """Three batches of noise in each epoch."""

    def __init__(self, num_classes):
        self.num_classes = num_classes

    def __len__(self):
        return 3

    def epoch(self, number, start=0):
        for position in range(start, 3):
            torch.manual_seed(position)
            label = torch.randint(self.num_classes, (2, 4, 4, 4))
            yield {"image": torch.randn(2, 1, 4, 4, 4), "label": label, "case": ["a", "b"]}


def make_training(network, folder, num_classes, *hooks, decay=0.7):
    """Return a training that averages the weights of a network, and writes checkpoints into a folder."""
    return Training(
        Named(network, inputs=["image"], outputs=["logits"]),
        Named(nn.functional.cross_entropy, inputs=["logits", "label"], outputs=["loss"]),
        torch.optim.SGD(network.parameters(), lr=0.3),
        Batches(num_classes),
        epochs=1,
        average_decay=decay,
        hooks=[*hooks, Checkpoints(folder)],
    )


def plain_training(epochs=1, batches=1, **options):
    """Return a training of one convolution of 3 x 3 x 3 by plain SGD."""
    torch.manual_seed(0)
    network = nn.Conv3d(1, 2, 3, padding=1)
    return Training(
        Named(network, inputs=["image"], outputs=["logits"]),
        Named(nn.functional.cross_entropy, inputs=["logits", "label"], outputs=["loss"]),
        torch.optim.SGD(network.parameters(), lr=0.1),
        [{"image": torch.randn(1, 1, 4, 4, 4), "label": torch.zeros(1, 4, 4, 4).long()} for _ in range(batches)],
        epochs=epochs,
        **options,
    )
