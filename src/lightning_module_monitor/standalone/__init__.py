"""The same engine without a Trainer."""
