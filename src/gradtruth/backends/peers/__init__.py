"""Peers: attention that others wrote, behind the contract of a backend.

What a peer gets wrong, or computes below the contract's precision, is refused with a reason. What an adapter does
beside translating is said in its docstring: half-precision inputs are widened where the peer would round sums or
scores, the lse gets the contract's form, and problems without a single element are answered here, because some
kernels divide by their sizes.
"""
