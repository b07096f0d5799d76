"""Headless notebooks and the pages, files and texts made from results."""
