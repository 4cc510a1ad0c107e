"""What the calls of each framework do: one file a framework."""
