"""flex's masks: made once from the places, and the same as its mask_mod says element by element."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from gradtruth.backends.peers import flex
from gradtruth.backends.peers.places import places_of, visible_mask
from gradtruth.verify.doctor.programme import PROGRAMME, case_of

ITEMS = {item.name: item for item in PROGRAMME}


@pytest.mark.parametrize(
    "name", ["window-d64", "thd-gaps-gqa-d128", "bottom-right-longer-keys-d64", "mask-d64"]
)
def test_the_block_mask_is_the_one_that_torch_makes_of_the_mask_mod(name):
    case = case_of(ITEMS[name].recipe)
    problem, inputs = case.problem, case.inputs
    places = places_of(problem, inputs)
    visible = visible_mask(problem, inputs, places)
    mods = flex._mods(problem, inputs, places, None)

    def mask_mod(b, h, m, n):
        return mods.mask(b, h, m, n, *mods.mask_tensors)

    found = flex.block_mask_of(visible, mask_mod)
    expected = create_block_mask(mask_mod, *visible.shape, device="cpu")
    assert found.mask_mod is mask_mod
    for got, want in zip(found.as_tuple(), expected.as_tuple(), strict=True):
        if isinstance(want, torch.Tensor):
            assert torch.equal(got, want)
            assert got.dtype == want.dtype
        else:
            assert got == want or got is mask_mod


@pytest.mark.parametrize("heads", [1, 3])
def test_the_table_mod_reads_the_table(heads):
    table = (torch.arange(2 * heads * 5 * 7) * 2654435761 % 97 < 40).view(2, heads, 5, 7)
    mod, tensors = flex._table_mod(table)
    found = create_block_mask_dense(lambda b, h, m, n: mod(b, h, m, n, *tensors), 2, 3, 5, 7)
    assert torch.equal(found, table.expand(2, 3, 5, 7))


def create_block_mask_dense(mod, *shape):
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mod, *shape, device="cpu")
