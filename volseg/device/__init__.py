"""Kernels, CUDA graphs and peer memory of GPUs; this package knows no volume, network or loss of volseg."""
