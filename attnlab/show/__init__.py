"""Display results: sheets of facts, plots, and interactive panels."""
