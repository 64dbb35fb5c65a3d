"""Augmentation: arithmetic on the device, from draws that are arithmetic too."""
