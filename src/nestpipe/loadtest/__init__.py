"""Open-loop load tests of the ranking service, and advice from request logs."""
