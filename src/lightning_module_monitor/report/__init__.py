"""What a store says of a run: a verdict, in the terminal and on a page, and the page with all of it to look at."""
