"""Sums over the voxels that Dice and cross entropy are made of."""
