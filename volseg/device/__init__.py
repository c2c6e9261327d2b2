"""Kernels, CUDA graphs and peer memory of GPUs; independent of volseg's volumes, networks and losses."""
