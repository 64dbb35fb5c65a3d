"""Searches for good options: many runs, each with options that a sampler proposes."""
