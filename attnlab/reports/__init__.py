"""Headless notebooks, their pages, JUnit, and texts and scripts for upstream."""
