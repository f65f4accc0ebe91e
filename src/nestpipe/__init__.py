"""NestPipe: exact, nested pipelining for recommendation models with very large tables."""

__version__ = "0.1.0"

__all__ = ["__version__"]
