"""Record, compare and restore the state of a network, apart from its inputs."""
