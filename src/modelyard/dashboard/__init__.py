"""Live pages over the folders of many runs: a table, curves, notes; stop, resume and delete."""
