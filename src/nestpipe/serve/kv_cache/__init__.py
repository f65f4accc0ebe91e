"""The KV cache of prefixes: a bounded device pool, and an LRU host tier with a TTL."""
