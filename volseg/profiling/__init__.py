"""Where a training step's time goes: kernels by layer and direction, against what the device could do at best."""
