"""What computes: TensorFlow, and whatever else can."""
