"""Discovers, polls and monitors GPUs through NVIDIA's management library (NVML), in threads.

`observer` is the source for the event loop. A `session` lasts from one initialisation of the
`library` to its shutdown. It uses `discovery`, and `events` in a separate thread; `monitor` runs
the session and tracks calls in flight. `decode` translates NVML's numbers.
"""
