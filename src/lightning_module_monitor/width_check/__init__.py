"""The width check: trains a model at several widths for a few steps, and fits the effects of its layers by powers of the width.

Internal: it may change in any version.
"""
