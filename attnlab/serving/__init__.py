"""Attention in a running vLLM: a plug-in that checks each call in place, and the report of what it found."""
