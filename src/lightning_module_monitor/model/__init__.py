"""What a model looks like."""
