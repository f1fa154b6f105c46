"""The CPU backend: a native executor that runs a whole engine step in one call. Imports no torch."""
