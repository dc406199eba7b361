"""The width check: at several widths the same model is trained for a few steps, and what its layers do is fitted by powers of the width."""
