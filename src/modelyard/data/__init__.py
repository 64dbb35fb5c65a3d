"""Datasets, their order, and augmentation."""
