"""Stands for torch where only processes matter: it is imported in no time."""

__version__ = "0"
