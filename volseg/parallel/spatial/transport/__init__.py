"""How planes and values move between shards."""
