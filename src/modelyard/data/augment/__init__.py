"""Augmentation on the device, with draws that are arithmetic."""
