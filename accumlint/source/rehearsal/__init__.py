"""The abstract interpreter that runs a training loop in its head."""
