"""A module that took the function under a name of its own, as many do; and an attention of a user's."""

from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend", "scaled_dot_product_attention"]


def attend(query, key, value):
    """[B, S, H, D]."""
    heads_second = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(*heads_second).transpose(1, 2)
