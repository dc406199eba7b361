"""The search for the first value that is not finite."""
