"""What is said of a model that is not well: the options, who made the first value that is not finite, and its snapshot."""
