"""Options of users: rules and schedules, as dataclasses that YAML can hold, and their checks.

Internal: it may change in any version.
"""
