"""Weights from elsewhere: files of many makers as named arrays, and which of them a model can take."""

from modelyard.run.weights.match import Matched, match
from modelyard.run.weights.named import NamedWeights
from modelyard.run.weights.read import read_weights

__all__ = ["Matched", "NamedWeights", "match", "read_weights"]
