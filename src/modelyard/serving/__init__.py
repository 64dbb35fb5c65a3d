"""After training: predict, export, serve."""
