"""The half that reads source code: it rehearses training loops and writes their traces."""
