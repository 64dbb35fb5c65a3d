"""Starts and stops the processes of a run: on this machine, or as a job for SLURM, Kubernetes or Vertex AI."""
