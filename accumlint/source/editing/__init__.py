"""Suppressions and, later, fixes."""
