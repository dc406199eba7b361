"""The steps of a module that is monitored, in any loop: no Lightning.

Internal: it may change in any version.
"""
