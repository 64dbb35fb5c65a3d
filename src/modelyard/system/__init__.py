"""What a run needs of the machine: the console, the log, whole files, hardware, signals. Nothing of a run folder."""
