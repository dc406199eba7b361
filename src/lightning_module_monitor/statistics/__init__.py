"""What is measured of a tensor."""
