"""Move planes and values between shards."""
