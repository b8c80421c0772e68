"""Peers: attention that others wrote, behind the contract of a backend.

An adapter translates, it repairs nothing: what a peer gets wrong, or computes below the contract's precision,
is refused with a reason. Three things are done around every peer: half-precision inputs are widened where the
peer would round sums or scores (each adapter says so), the lse gets the contract's form, and problems without a
single element are answered here, because some kernels divide by their sizes.
"""
