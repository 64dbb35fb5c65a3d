"""Sources of examples: built-in datasets, and a user's own files."""
