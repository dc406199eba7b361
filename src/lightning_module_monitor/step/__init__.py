"""What a monitored step has observed, from the first tensor to its record; probes fill it, and the engine ends it."""
