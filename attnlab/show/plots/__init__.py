"""Plot functions: each draws given data on an Axes and returns it."""
