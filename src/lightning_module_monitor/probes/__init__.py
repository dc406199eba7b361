"""Where tensors come from."""
