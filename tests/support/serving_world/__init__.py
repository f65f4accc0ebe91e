"""Real routers and instances in a world whose threads take turns, picked by a seed."""
