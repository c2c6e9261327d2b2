"""Memory that GPUs of one machine share, and the exchanges through it."""
