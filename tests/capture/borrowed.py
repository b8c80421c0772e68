"""A module that took the function under a name of its own, as many do."""

from torch.nn.functional import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention"]
