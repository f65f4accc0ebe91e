"""Relay serving of the trained ranker: long histories inside a tail-latency target."""
