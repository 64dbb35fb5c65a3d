"""Several processes, one run: who they are, and how they keep in touch."""
