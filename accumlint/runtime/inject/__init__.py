"""The folder that an observed run has in front of its PYTHONPATH."""
