"""The processes of a run and their roles, from TF_CONFIG or SLURM. `modelyard.distributed` connects them."""
