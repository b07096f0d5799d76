"""Tasks: many independent cases, run by an engine, with a verdict for each, a store and shards.

Nothing here concerns attention: a command describes its cases as tasks, and how a worker runs one as a job.
"""
