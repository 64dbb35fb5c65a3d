"""Private APIs of other libraries: one module per library, with the versions that it was written for."""
