"""The outer loop and its hooks."""
