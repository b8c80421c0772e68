"""The kernels. Importing this package imports Triton."""
