"""Plan a training config from the fingerprint of a data set."""
