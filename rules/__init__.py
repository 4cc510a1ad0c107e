"""The catalogue: one module a rule, whose docstring is the page."""
