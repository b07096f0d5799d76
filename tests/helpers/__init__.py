"""What the tests share: cases, strategies, sources and runners."""
