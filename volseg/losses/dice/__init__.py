"""Sums over voxels from which Dice and cross entropy are computed."""
