"""Starts the processes of a run: as a cluster on this machine, or on somebody else's. Stops them, too."""
