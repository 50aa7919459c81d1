"""The report of a run, from its folder alone: read, draw, write."""
