"""Whether a model trains well: options, detectors, alerts, diagnoses, and the module that made the first value that is not finite.

Internal: it may change in any version.
"""
