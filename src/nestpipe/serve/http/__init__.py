"""The HTTP face of instances and router."""
