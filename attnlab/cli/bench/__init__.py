"""Measurements of the lab itself."""
