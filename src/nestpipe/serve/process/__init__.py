"""The processes of a service: launcher, worker, server."""
