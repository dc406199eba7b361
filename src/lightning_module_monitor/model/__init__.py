"""Models: names, compiled parts, hooks, outputs, copies, and contexts that undo side effects.

Internal: it may change in any version.
"""
