"""The HDF5 file: its layout, writing and reading it.

Internal: it may change in any version.
"""
