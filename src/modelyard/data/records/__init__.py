"""TFRecord files with an index: read, written, converted into."""
