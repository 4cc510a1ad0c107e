"""`accumlint doctor`: an experiment with a known outcome on this machine, and what its torch lets `accumlint verify` observe."""
