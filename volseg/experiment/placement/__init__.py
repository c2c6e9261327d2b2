"""Place a training on GPUs: its mesh, its memory, its kernels, and what `volseg plan` says of it."""
