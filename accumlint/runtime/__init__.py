"""Measures a short run: what the probes record in the ranks, and what the controller makes of it."""
