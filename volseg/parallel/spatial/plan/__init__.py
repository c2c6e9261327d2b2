"""Which shard owns and needs which planes: pure arithmetic."""
