"""Show where a training step's time goes: kernels by layer and direction, compared with the device's peak rates."""
