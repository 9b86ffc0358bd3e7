"""Koushi: large language models trained on an N-dimensional lattice of devices."""

__version__ = "0.1.0"
