"""Sweeps (`python -m gpt3d.train -m ...`): a record of each job, the table at the end, and what is read from it."""
