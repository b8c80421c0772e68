"""Other libraries' names for what gradtruth does, one module per library."""
