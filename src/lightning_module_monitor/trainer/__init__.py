"""What needs a Lightning Trainer beside the callback."""
