"""Where tensors come from.

Internal: it may change in any version.
"""
