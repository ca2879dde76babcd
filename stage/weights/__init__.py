"""Weights as a file stores them, and what their bytes mean."""
