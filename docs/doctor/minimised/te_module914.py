"""backward: dk, where fresh memory holds 0x3c: nonzero: 8 not 0 where nothing contributes
te_module on b1 s1 t2 h2/1 d8 fp16 thd full (gradtruth not installed, torch 2.11.0+cu130)."""
import sys
import torch
from gradtruth.verify.minimise.replay import replay
torch.set_default_device('cuda:0')
calls = [
    dict(spec='{"layout":"thd","lengths":"cu_seqlens"}', bounds=(None, None),
        q=torch.zeros(1, 2, 8, dtype=torch.float16), k=torch.zeros(2, 1, 8, dtype=torch.float16),
        v=torch.zeros(2, 1, 8, dtype=torch.float16), cu_seqlens_q=torch.zeros((2,), dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0,1], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0,1], dtype=torch.int32),
        cu_seqlens_kv_padded=torch.tensor([0,2], dtype=torch.int32), dout=torch.zeros(1, 2, 8, dtype=torch.float16)),  # b1 s1 t2 h2/1 d8 fp16 thd full
]
found = replay('te_module', 'backward', ('dk', 'nonzero'), calls, 'cuda:0', memory=0x3c)
sys.exit(found)
