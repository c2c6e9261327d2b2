"""Transform cases between their files and the network.

`preprocessing` prepares one case, reproducibly and reversibly. `augmentation` varies whole batches on the training
device. `grid` describes the positions of a volume's voxels.
"""
