"""Reports on stored runs: the verdict, and the HTML page with charts.

Internal: it may change in any version.
"""
