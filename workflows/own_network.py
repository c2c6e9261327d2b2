"""Use your own network, loss and hook in a training from a config.

python workflows/own_network.py DIR/Task04_Hippocampus --set training.epochs=5

On the command line: ``volseg train CONFIG --components FILE`` with these classes in the file.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import volseg
from volseg.experiment import load_config, train


@volseg.register("network", "Residual")
class Residual(nn.Module):
    """Residual blocks that keep the grid."""

    def __init__(self, in_channels, out_channels, width=8, blocks=2):
        super().__init__()
        self.stem = nn.Conv3d(in_channels, width, 3, padding=1)
        block = [nn.InstanceNorm3d(width), nn.ReLU()]
        self.blocks = nn.ModuleList(nn.Sequential(*block, nn.Conv3d(width, width, 3, padding=1)) for _ in range(blocks))
        self.head = nn.Conv3d(width, out_channels, 1)

    def forward(self, image):
        """Return logits (B, K, D, H, W) of an image (B, C, D, H, W)."""
        features = self.stem(image)
        for block in self.blocks:
            features = features + block(features)
        return self.head(features)


@volseg.register("loss", "SmoothedCrossEntropy")
class SmoothedCrossEntropy(nn.Module):
    """Cross entropy with label smoothing."""

    def forward(self, logits, label):
        """Return the mean over voxels."""
        return F.cross_entropy(logits, label.squeeze(1).long(), label_smoothing=0.1)


@volseg.register("hook", "TellNorm")
class TellNorm(volseg.Hook):
    """Print the norm of the weights."""

    def on_epoch_end(self, training, record):
        """Print a line for each epoch."""
        norm = torch.stack([weight.norm() for weight in training.model.parameters()]).norm()
        print(f"epoch {record.epoch + 1}: loss {record.losses['loss']:.4f}, weights {norm.item():.3f}")


def main() -> None:
    """Train with these components for the epochs of the config."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("root", help="the task's folder")
    arguments.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the config"
    )
    given = arguments.parse_args()
    own = ["network={name: Residual, width: 16}", "losses=[{name: SmoothedCrossEntropy}]", "hooks=[{name: TellNorm}]"]
    place = [f"data.root={given.root}", "name=own_network"]
    train(load_config("configs/task04_cpu.yaml", [*place, *own, *given.set]))


if __name__ == "__main__":
    main()
