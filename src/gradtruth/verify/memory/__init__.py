"""Memory: fresh allocations that hold a known byte, so that a read before the first write shows."""
