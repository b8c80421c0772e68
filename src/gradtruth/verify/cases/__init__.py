"""Cases: captured tensors with their problem, one file each, read with suspicion."""
