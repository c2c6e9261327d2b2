"""Where a network is cut: pure arithmetic over measured costs."""
