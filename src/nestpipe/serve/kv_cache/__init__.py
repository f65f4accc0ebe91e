"""The KV cache of prefixes: device pool, host tier, acquisition."""
