"""The HDF5 file: its layout, writing and reading it."""
