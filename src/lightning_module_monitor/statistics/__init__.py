"""Statistics of tensors.

Internal: it may change in any version.
"""
