"""Measurements of flexmask side by side with its peers: ``python -m benchmarks``."""
