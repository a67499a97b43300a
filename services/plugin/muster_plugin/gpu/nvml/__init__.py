"""NVIDIA's management library: discovers, polls and monitors GPUs, in threads.

`observer` is the source for the event loop. A `session` is one initialisation of the `library`: it
uses `discovery`, and `events` in a thread of its own; `monitor` runs it and tracks the calls in
flight. `decode` translates NVML's numbers.
"""
