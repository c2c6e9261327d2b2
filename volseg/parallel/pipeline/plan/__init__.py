"""Choose the cuts of a network: pure arithmetic over measured costs."""
