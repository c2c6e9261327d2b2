"""What a training step needs, told before its first run: its memory and its time on a GPU that need not be there.

The step runs on tensors without values, is written down as a ``StepTrace``, and that goes through a model of torch's
allocator and of the GPU's speed.
"""
