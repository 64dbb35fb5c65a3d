"""Predictions as tables."""
