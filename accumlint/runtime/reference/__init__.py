"""The gradient that a window should have had, from the same run, and how far the real one is from it."""
