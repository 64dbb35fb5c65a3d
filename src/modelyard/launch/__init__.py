"""Starting the processes of a run: on this machine, or on somebody else's."""
