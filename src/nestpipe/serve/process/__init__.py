"""The processes of a service: launch, supervise, stop."""
