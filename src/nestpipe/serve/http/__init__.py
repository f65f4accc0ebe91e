"""The HTTP service of an instance or a router: processes, limits, bodies, apps, metrics, client."""
