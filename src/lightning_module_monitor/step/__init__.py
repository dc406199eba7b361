"""The observations of a monitored step, from its first tensor to its record; probes add to them, and the engine finishes them.

Internal: it may change in any version.
"""
