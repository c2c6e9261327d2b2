"""Show and record a run: progress bars, loggers such as TensorBoard, status files, and the machine's environment."""
