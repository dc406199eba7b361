"""Controllers that the callback drives, and everything else that needs a Lightning Trainer.

Internal: it may change in any version.
"""
