"""Compute the planes that each shard owns and needs: pure arithmetic."""
