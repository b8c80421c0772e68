"""The pure part: what a problem is, where its sequences lie and what is visible. No I/O, no kernels."""
