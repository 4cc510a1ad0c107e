"""The weight of every valid target, read from the loss functions that a run calls."""
