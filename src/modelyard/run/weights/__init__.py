"""Weights from other files: a reader per format, and which of the weights a model takes."""
