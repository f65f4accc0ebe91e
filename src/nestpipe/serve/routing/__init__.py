"""Which instance serves a user: hash ring, health, router, nginx."""
