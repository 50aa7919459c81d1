"""Is a layout equal to one plain process? The tests and `python -m gpt3d.verify` ask the same code."""
