"""Train on volumes too large for one GPU: each is cut over all GPUs, in an unchanged training loop.

python workflows/large_volume.py --side 256                      # all GPUs that are visible
python workflows/large_volume.py --side 32 --devices cpu cpu     # two slabs on a CPU: the same numbers

One process drives all devices here. A process per GPU is faster:
``volseg train CONFIG --gpus 4 --set parallel.spatial=4``.
"""

import argparse

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import DynUNet

import volseg


def main() -> None:
    """Run some steps on synthetic volumes; print the losses and the memory."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--side", type=int, default=256, help="side of the volume in voxels; a multiple of 8")
    arguments.add_argument("--devices", nargs="+", help="default all visible GPUs")
    arguments.add_argument("--steps", type=int, default=3)
    given = arguments.parse_args()
    torch.manual_seed(0)

    network = DynUNet(
        3, 1, 2, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[16, 32, 64]
    )
    # Activations are recomputed in the backward pass: a third more time, for volumes 1.5 times as large.
    model = volseg.ModelParallel(network, strategy="spatial", devices=given.devices, checkpoint="all")
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    volume = torch.randn(1, 1, *[given.side] * 3)
    label = (volume > 1).long()
    for step in range(given.steps):
        loss = criterion(model(volume), label)  # computed on slabs: nothing is gathered on one GPU
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}")
    for device in range(torch.cuda.device_count()):
        print(f"cuda:{device}: {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
