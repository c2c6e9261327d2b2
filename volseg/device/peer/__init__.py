"""Memory that other GPUs of the machine read and write, and the exchanges through it."""
