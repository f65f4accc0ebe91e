"""Relay serving of the trained ranker: long histories inside a tail-latency target.

An early signal has the prefix (keys and values of a user's long history) computed while candidates
are still retrieved; the ranking then reads it. A request passes `http/` (limits, apps, bodies),
`routing/` (both legs of a user to one instance), `engine/` (admission control, state, scheduler,
model thread, copies), `kv_cache/` (device pool, host tier) and `model/` (the ranker). `process/`
starts and supervises all of it.
"""
