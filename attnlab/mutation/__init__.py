"""Find the defects that a test would notice, and the changes that make it notice the others."""
