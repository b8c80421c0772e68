"""strides: dk: value: differs from contiguous copies, with wide dout: element 0.417 > 0.0387, row 56.8 > 1.34, rms 0.679 > 0.0165, projection 0.655 > 0.0201
sdpa_cudnn on b1 s2 h2/2 d64 bf16 bshd full (gradtruth not installed, torch 2.11.0+cu130)."""
import base64, sys, zlib
import torch
from gradtruth.verify.minimise.replay import replay
torch.set_default_device('cuda:0')
def packed(text, dtype, *shape): return torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=dtype).view(shape).to(torch.get_default_device())
calls = [
    dict(spec='{}', bounds=(None, None),
        q=packed('c-rO9K>+|D3<I%KMklROP(mkVQt$!)d_wOKFKaY$e9#uvsX(d4)8g+vx>X0`%m', torch.bfloat16, 1, 2, 2, 64),
        k=packed('c-rO9K>+|D3<I%KMklROP(mkVQt$!)d_q^yXa}|?q(nJht&Wey+v4xNE`E>TQU', torch.bfloat16, 1, 2, 2, 64),
        v=packed('c-rO9K>+|D3<I%KMklROP(mkVQt$!)d_w!QoYDkF6|3V#k*yuX+v4xNF8LAS5C', torch.bfloat16, 1, 2, 2, 64),
        dout=packed('c-rO9F#!ND3<5BejY>mGl?<d*N_}j9o*>0C3Y3RB?GT8Yx?>T>)8g-axN>yg&;', torch.bfloat16, 1, 2, 2, 64)),  # b1 s2 h2/2 d64 bf16 bshd full
]
found = replay('sdpa_cudnn', 'strides', ('dk', 'value'), calls, 'cuda:0')
sys.exit(found)
