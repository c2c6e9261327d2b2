"""What happens to a case between its files and the network.

`preprocessing` prepares one case, reproducibly and reversibly; augmentation varies whole batches on the training
device. `grid` says where the voxels of a volume lie.
"""
