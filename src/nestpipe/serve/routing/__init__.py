"""Which instance serves a user: consistent hashing, health checks, router, nginx."""
