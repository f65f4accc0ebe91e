"""The HTTP service around an instance or a router: limits, bodies, apps, metrics, client."""
