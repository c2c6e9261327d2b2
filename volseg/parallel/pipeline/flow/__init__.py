"""Run micro-batches over the devices."""
