"""Connects the processes of a run: the coordinator and its followers. A single-process run never imports this."""
