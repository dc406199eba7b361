"""Communication with other ranks: reduction of statistics, sharded parameters, and the check that all ranks record the same.

Internal: it may change in any version.
"""
