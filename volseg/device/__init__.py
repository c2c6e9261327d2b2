"""What one GPU and its neighbours can do: kernels, recording, peer memory. No volume, network or loss of ours."""
