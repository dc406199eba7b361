"""The search for the first value that is not finite.

Internal: it may change in any version.
"""
