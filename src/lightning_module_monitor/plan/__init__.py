"""Planning: rules and the model's names become streams and planned keys.

Internal: it may change in any version.
"""
