"""Where examples come from: datasets by name, and a user's own files."""
