"""The machine as a run uses it: console, files, hardware, network, pid files, logs, signals. Knows nothing of runs."""
