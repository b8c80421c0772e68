"""What the instrument finds: planted faults by check, family, law and problem; factors; a usual test beside it."""
