"""Place a training on GPUs: its mesh, its memory, its kernels, and the output of `volseg plan`."""
