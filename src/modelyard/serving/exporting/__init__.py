"""Models that leave Modelyard: SavedModel, Keras, ONNX, TensorFlow Lite."""
