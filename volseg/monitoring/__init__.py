"""What a person sees of a run: progress bars, TensorBoard, and a record of the machine it ran on."""
