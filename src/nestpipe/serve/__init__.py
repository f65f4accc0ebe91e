"""Relay serving of the trained ranker: long histories inside a tail-latency target.

An early signal has the prefix (keys and values of a user's long history) computed while candidates
are still retrieved; the ranking then reads it. A request passes `http/` (limits, apps, bodies, the
router that brings both legs of a user to one instance) and `engine/` (admission control, state,
scheduler, model thread, KV cache, the ranker). `http/` also starts and supervises the processes.
"""
