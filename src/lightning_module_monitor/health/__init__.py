"""What is said of a model that is not well: the options, the module that made the first value that is not finite, and its snapshot."""
