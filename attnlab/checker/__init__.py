"""The sanitizer: it runs the ops of a kernel library over hostile cases and reports what goes wrong."""
