"""Replay: run a saved call again, on other backends and releases, changed a little, or smaller."""
