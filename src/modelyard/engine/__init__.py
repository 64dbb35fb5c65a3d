"""Engines: TensorFlow and JAX."""
