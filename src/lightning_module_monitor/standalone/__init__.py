"""The engine without a Trainer, under the names of other tools."""
