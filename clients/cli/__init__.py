"""The command line: `artesian serve`, `pull`, `run`, `chat`, `bench`, `explain`, `doctor`."""

from .app import main

__all__ = ["main"]
