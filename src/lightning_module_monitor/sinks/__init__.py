"""The destinations of records: loggers, memory, and the files of a run.

Internal: it may change in any version.
"""
