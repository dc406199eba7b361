"""Reports on stored runs: the verdict, and the HTML page with charts."""
