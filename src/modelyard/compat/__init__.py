"""Uses of private APIs, one module per library, each with the version it was written for. tests/test_compat.py."""
