"""cudnn-frontend 1.32 without cuDNN: graphs that record what they are told, and run it on the CPU.

A run reads and writes memory only through the dims, strides and ragged offsets of the graph, as cuDNN does, and
writes no place outside a sequence.
"""

from __future__ import annotations

import enum
import sys
import types
from contextlib import nullcontext

import torch

import gradtruth

GRAPHS: list[Graph] = []
"""Every graph since the list was cleared."""
RUNS: list[dict] = []
"""Half, workspace and stream of every run."""
SCRATCH = 4096

data_type = enum.Enum("data_type", "HALF BFLOAT16 FLOAT INT32 INT64")
diagonal_alignment = enum.Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
heur_mode = enum.Enum("heur_mode", "A FALLBACK")
_DTYPES = {
    data_type.HALF: torch.float16,
    data_type.BFLOAT16: torch.bfloat16,
    data_type.FLOAT: torch.float32,
    data_type.INT32: torch.int32,
    data_type.INT64: torch.int64,
}


class cudnnGraphNotSupportedError(Exception):
    pass


class Tensor:
    def __init__(self, name="", dim=None, stride=None, kind=None):
        self.name, self.dim, self.stride, self.kind = name, dim, stride, kind
        self.offset, self.output = None, False

    def set_output(self, value):
        self.output = value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, kind):
        self.kind = kind
        return self

    def set_ragged_offset(self, offset):
        self.offset = offset
        return self


class Graph:
    def __init__(
        self,
        name="",
        io_data_type=None,
        intermediate_data_type=None,
        compute_data_type=None,
        handle=None,
    ):
        self.io, self.compute, self.handle = io_data_type, compute_data_type, handle
        self.intermediate = intermediate_data_type
        self.barred, self.steps, self.options = [], [], {}
        GRAPHS.append(self)

    def tensor(self, dim, stride=None, data_type=None, name=""):
        return Tensor(name, dim, stride, data_type)

    def sdpa(self, q, k, v, **options):
        assert options["generate_stats"] is True
        self.half, self.inputs, self.options = "forward", {"q": q, "k": k, "v": v}, options
        self.results = {"o": Tensor("O"), "stats": Tensor("Stats")}
        return list(self.results.values())

    def sdpa_backward(self, q, k, v, o, dO, stats, **options):
        self.half, self.options = "backward", options
        self.inputs = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        self.results = {name: Tensor(name) for name in ("dq", "dk", "dv")}
        return list(self.results.values())

    def validate(self):
        self.steps.append("validate")

    def build_operation_graph(self):
        self.steps.append("build_operation_graph")

    def create_execution_plans(self, modes):
        assert modes == [heur_mode.A, heur_mode.FALLBACK]
        self.steps.append("create_execution_plans")

    def deselect_engines(self, names):
        assert self.steps[-1] == "create_execution_plans"
        self.barred += names

    def check_support(self):
        self.steps.append("check_support")
        if self.options.get("bias") and self.bottom_right:
            raise cudnnGraphNotSupportedError(
                "Bottom right causal mask is only\n supported with is_bias=False"
            )

    def build_plans(self):
        assert self.steps[-1] == "check_support"
        assert self.barred == ["sdpa_fwd_prefill_", "sdpa_bwd_"]
        self.steps.append("build_plans")

    def get_workspace_size(self):
        return SCRATCH

    @property
    def bottom_right(self):
        return self.options["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT

    def execute(self, pack, workspace, handle=None):
        assert self.steps[-1] == "build_plans"
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= SCRATCH
        RUNS.append(
            {"half": self.half, "workspace": workspace, "stream": STREAM["current"], "graph": self}
        )
        for tensor, data in pack.items():
            assert data.dtype == _DTYPES[tensor.kind], tensor.name
        _execute(self, pack)


STREAM = {"current": None}


def set_stream(handle, stream):
    STREAM["current"] = stream


def create_handle():
    return object()


def _memory(data):
    """All of a tensor's memory from its first element on."""
    storage = torch.empty(0, dtype=data.dtype).set_(data.untyped_storage())
    return storage[data.storage_offset() :]


def _places(graph, pack, tensor, n, length):
    """The part of a tensor that holds sequence n: [heads, length, dim]."""
    _, heads, _, dim = tensor.dim
    b, h, s, d = tensor.stride
    start = n * b if tensor.offset is None else int(pack[tensor.offset][n])
    return _memory(pack[tensor])[start:].as_strided((heads, length, dim), (h, s, d))


def _lengths(graph, pack):
    q, k = graph.inputs["q"], graph.inputs["k"]
    batch = q.dim[0]
    if not graph.options.get("use_padding_mask"):
        assert q.offset is None
        return [q.dim[2]] * batch, [k.dim[2]] * batch
    found = [pack[graph.options[f"seq_len_{side}"]].tolist() for side in ("q", "kv")]
    assert max(found[0]) <= q.dim[2]
    assert max(found[1]) <= k.dim[2]
    return found


def _call(graph, pack, n):
    """The options of gradtruth's own attention for sequence n alone."""
    given = graph.options
    left, right = given.get("diagonal_band_left_bound"), given.get("diagonal_band_right_bound")
    found = {
        "softmax_scale": given["attn_scale"],
        "window_size": (-1 if left is None else left - 1, -1 if right is None else right),
        "bottom_right_diagonal": graph.bottom_right,
        "backend": "reference",
    }
    if "bias" in given:
        bias = _memory(pack[given["bias"]]).as_strided(given["bias"].dim, given["bias"].stride)
        found["bias"] = bias[n : n + 1] if bias.shape[0] > 1 else bias
    if "sink_token" in given:
        found |= {
            "softmax_type": "learnable",
            "softmax_offset": pack[given["sink_token"]].reshape(-1),
        }
    if "dropout" in given:
        p, seed, offset = given["dropout"]
        assert not pack[offset].any()
        # One seed per sequence, for here each is sequence 0.
        found |= {"dropout_p": p, "dropout_seed": pack[seed].reshape(()) + n}
    return found


def _execute(graph, pack):
    totals = {}
    for n, (queries, keys) in enumerate(zip(*_lengths(graph, pack), strict=True)):
        given = {
            name: _places(graph, pack, tensor, n, keys if name in ("k", "v") else queries)
            for name, tensor in graph.inputs.items()
        }
        q, k, v = (given[name].transpose(0, 1).unsqueeze(0) for name in ("q", "k", "v"))
        options = _call(graph, pack, n)
        if graph.half == "forward":
            maximum = graph.options.get("score_max")
            out, lse, top = gradtruth.attention_forward(
                q, k, v, return_max_logit=maximum is not None, **options
            )
            found = {"o": out[0].transpose(0, 1), "stats": lse[0].unsqueeze(-1)}
            if maximum is not None:
                # By row in cuDNN; the maximum of the rows is what is looked at.
                _places(graph, pack, maximum, n, queries).copy_(
                    top[:, None, None].expand(-1, queries, 1)
                )
        else:
            dout, out = (given[name].transpose(0, 1).unsqueeze(0) for name in ("dO", "o"))
            dq, dk, dv, dbias, dsink = gradtruth.attention_backward(
                dout, q, k, v, out, given["stats"].squeeze(-1).unsqueeze(0),
                deterministic=graph.options["use_deterministic_algorithm"], **options,
            )  # fmt: skip
            found = {name: x[0].transpose(0, 1) for name, x in (("dq", dq), ("dk", dk), ("dv", dv))}
            for name, grad in (("dBias", dbias), ("dSink_token", dsink)):
                if grad is not None:
                    _add(totals, graph.options[name], grad, n)
        for name, value in found.items():
            length = keys if name in ("dk", "dv") else queries
            _places(graph, pack, graph.results[name], n, length).copy_(value)
    for tensor, total in totals.items():
        pack[tensor].copy_(total.reshape(tensor.dim))


def _add(totals, tensor, grad, n):
    total = totals.setdefault(tensor, torch.zeros(tensor.dim))
    if tensor.dim[0] > 1:
        total[n] += grad[0]
    else:
        total += grad.reshape(tensor.dim)


def install(monkeypatch):
    """Put the stand-in where cudnn-frontend is looked for, and pretend there is a device."""
    from gradtruth.backends.peers import cudnn_frontend, cudnn_graph

    module = types.ModuleType("cudnn")
    for name in (
        "data_type", "diagonal_alignment", "heur_mode", "create_handle", "set_stream", "cudnnGraphNotSupportedError",
    ):  # fmt: skip
        setattr(module, name, globals()[name])
    module.pygraph = Graph
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(cudnn_frontend, "cuda_reasons", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=77))
    for cached in (cudnn_graph._handle, cudnn_graph._built, cudnn_frontend._refusals):
        cached.cache_clear()
    GRAPHS.clear()
    RUNS.clear()
