"""All that speaks with other ranks: what every rank has seen brought together, sharded parameters, agreement."""
