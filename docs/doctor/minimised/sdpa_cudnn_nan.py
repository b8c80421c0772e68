"""backward: dq: nonfinite: 1 NaN or Inf, 7 not 0 where nothing contributes
sdpa_cudnn on b1 s1 t64 h1/1 d8 bf16 bshd full (gradtruth not installed, torch 2.11.0+cu130)."""
import base64, sys, zlib
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
torch.set_default_device('cuda:0')
def packed(text, dtype, *shape): return torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=dtype).view(shape).to(torch.get_default_device())
calls = [
    dict(q=torch.tensor([[[[1.0,0.0,0.0,-0.0,0.0,-0.0,0.0,0.0]]]], dtype=torch.bfloat16),
        k=packed('c-n1~iw%S@3`0FKBX~FlyB_N2ISoi4lg3FL^St_B9{2Zt7FL7DbKn(AJimVD-C|EZlVRd@g7p?Yr?s(H7V=NM6Yu%JSon#vUn7nV3creeD*Zb0b?JBX@YYwX5PB)%#y*&DD%93bJ;V&;d;1~x+0C1J>6(Xn(NBk8nD^dK^(*}-I;xo$)!@(6)3FbgxWj*f<5Qnn-?887Z(=ukq~BchbK_U~f&Vk&Kkah60R', torch.bfloat16, 1, 64, 1, 8),
        v=torch.zeros(1, 64, 1, 8, dtype=torch.bfloat16), dout=torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)),  # b1 s1 t64 h1/1 d8 bf16 bshd full
]
def run(q, k, v, dout):
    q, k, v = (x.permute(0, 2, 1, 3).detach().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=False, scale=0.35355339059327373, enable_gqa=False)
    grads = torch.autograd.grad(out, (q, k, v), dout.permute(0, 2, 1, 3))
    return (out, *grads)[1].detach().permute(0, 2, 1, 3).double()
found = [run(**call) for call in calls][-1]
right = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
error = (found - right).abs().nan_to_num(float("inf")).where(found != right, 0).flatten()
worst = error.argsort(descending=True)[:6]
print("dq found", found.flatten()[worst].tolist())
print("dq right", right.flatten()[worst].tolist())
sys.exit(int(error.max() > 1))
