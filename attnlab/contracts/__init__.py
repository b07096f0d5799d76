"""What each op and kernel requires, who runs, and where a call violates it."""
