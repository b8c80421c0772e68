import pytest
import torch

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case


@pytest.fixture
def case_file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 12, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    inputs = Inputs(q=q, k=k, v=v, softmax_offset=torch.randn(4, generator=generator))
    case = Case.of(
        Spec(right=0, softmax="learnable"), inputs, dout, provenance={"model": "[b]tiny"}
    )
    path = tmp_path / "layer3.safetensors"
    case.save(path)
    return path
