"""Graphs of cudnn-frontend: built from their terms, kept, and run with a workspace that the caller hands in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.peers.compiling import compiling
from gradtruth.backends.peers.cudnn_terms import GraphTerms, TensorTerms

__all__ = ["Workspace", "check_support", "describe", "run"]

Workspace = Callable[[int, torch.device], Tensor]
"""Makes the scratch memory of one run: bytes and device to a uint8 tensor of at least that many elements."""

# Kernels of the front end itself, in Python: what is called here is the cuDNN library.
_PYTHON_ENGINES = ["sdpa_fwd_prefill_", "sdpa_bwd_"]


def run(
    terms: GraphTerms, tensors: dict[str, Tensor], workspace: Workspace, device: torch.device
) -> None:
    """Run a graph on the current stream; its outputs are written in place.

    Args:
        terms: of the graph.
        tensors: by the names in the terms, and every ragged offset.
        workspace: makes the scratch memory.
        device: of the tensors.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    graph, nodes = _built(terms, index)
    scratch = workspace(graph.get_workspace_size(), device)
    handle = _handle(index)
    library = import_module("cudnn")
    with torch.cuda.device(index):
        library.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute({nodes[name]: tensors[name] for name in nodes}, scratch, handle=handle)


def check_support(terms: GraphTerms, index: int) -> str | None:
    """Why cuDNN refuses a graph, in its words; None when it does not."""
    library = import_module("cudnn")
    try:
        with compiling():
            graph, _ = describe(terms, library, _handle(index))
            _plan(graph, library)
    except (library.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split())
    return None


@cache
def _handle(index: int) -> Any:
    """One handle per device."""
    with torch.cuda.device(index):
        return import_module("cudnn").create_handle()


@lru_cache(maxsize=256)
def _built(terms: GraphTerms, index: int) -> tuple[Any, dict[str, Any]]:
    """A graph ready to run, and its tensors by name. It holds no memory and no number but those in the terms."""
    library = import_module("cudnn")
    with torch.cuda.device(index), compiling():
        graph, nodes = describe(terms, library, _handle(index))
        _plan(graph, library)
        graph.build_plans()
    return graph, nodes


def _plan(graph: Any, library: Any) -> None:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
    if hasattr(graph, "deselect_engines"):
        graph.deselect_engines(_PYTHON_ENGINES)
    graph.check_support()


def describe(terms: GraphTerms, library: Any, handle: Any) -> tuple[Any, dict[str, Any]]:
    """The graph of these terms, neither checked nor planned, and its tensors by name, ragged offsets included."""
    kinds = library.data_type
    graph = library.pygraph(
        io_data_type=_kind(library, terms.dtype),
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=handle,
    )
    nodes: dict[str, Any] = {}
    for tensor in terms.tensors:
        if not tensor.output or tensor.name in _ARGUMENTS:
            nodes[tensor.name] = _input(graph, library, tensor, terms, nodes)
    options = _options(terms, library, nodes)
    if terms.half == "forward":
        found = graph.sdpa(q=nodes["q"], k=nodes["k"], v=nodes["v"], generate_stats=True, **options)
        names = ("o", "stats")
    else:
        found = graph.sdpa_backward(
            q=nodes["q"],
            k=nodes["k"],
            v=nodes["v"],
            o=nodes["o"],
            dO=nodes["do"],
            stats=nodes["stats"],
            use_deterministic_algorithm=terms.deterministic,
            **options,
        )
        names = ("dq", "dk", "dv")
    results = {tensor.name: tensor for tensor in terms.tensors if tensor.output}
    for name, node in zip(names, found, strict=True):
        nodes[name] = node
        _place(node, graph, library, results[name], terms, nodes)
    for name in results:
        if name in _ARGUMENTS:
            nodes[name].set_output(True).set_data_type(_kind(library, results[name].dtype))
    return graph, nodes


# Outputs that cuDNN takes as arguments, and by which name.
_ARGUMENTS = {"max": "score_max", "dbias": "dBias", "dsink": "dSink_token"}


def _options(terms: GraphTerms, library: Any, nodes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of both halves."""
    corner = library.diagonal_alignment
    found: dict[str, Any] = {
        "name": f"sdpa_{terms.half}",
        "attn_scale": terms.scale,
        "diagonal_alignment": corner.BOTTOM_RIGHT if terms.bottom_right else corner.TOP_LEFT,
    }
    if terms.left is not None:
        found["diagonal_band_left_bound"] = terms.left
    if terms.right is not None:
        found["diagonal_band_right_bound"] = terms.right
    if terms.padding:
        found |= {
            "use_padding_mask": True,
            "seq_len_q": nodes["length_q"],
            "seq_len_kv": nodes["length_kv"],
        }
    if terms.dropout_p:
        found["dropout"] = (terms.dropout_p, nodes["seed"], nodes["philox_offset"])
    named = {"bias": "bias", "sink": "sink_token", **_ARGUMENTS}
    return found | {argument: nodes[name] for name, argument in named.items() if name in nodes}


def _input(
    graph: Any, library: Any, tensor: TensorTerms, terms: GraphTerms, nodes: dict[str, Any]
) -> Any:
    found = graph.tensor(
        name=tensor.name,
        dim=list(tensor.dim),
        stride=list(tensor.stride),
        data_type=_kind(library, tensor.dtype),
    )
    if tensor.offset is not None:
        found.set_ragged_offset(_offset(graph, library, tensor, terms, nodes))
    return found


def _place(
    node: Any,
    graph: Any,
    library: Any,
    tensor: TensorTerms,
    terms: GraphTerms,
    nodes: dict[str, Any],
) -> None:
    """Say where a result goes."""
    node.set_output(True).set_dim(list(tensor.dim)).set_stride(list(tensor.stride))
    node.set_data_type(_kind(library, tensor.dtype))
    if tensor.offset is not None:
        node.set_ragged_offset(_offset(graph, library, tensor, terms, nodes))


def _offset(
    graph: Any, library: Any, tensor: TensorTerms, terms: GraphTerms, nodes: dict[str, Any]
) -> Any:
    """The ragged offset of a tensor; statistics share one."""
    name = str(tensor.offset)
    if name not in nodes:
        kinds = library.data_type
        nodes[name] = graph.tensor(
            name=name,
            dim=[tensor.dim[0] + 1, 1, 1, 1],
            stride=[1, 1, 1, 1],
            data_type=kinds.INT64 if terms.wide_offsets else kinds.INT32,
        )
    return nodes[name]


_KINDS = {
    "float16": "HALF",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT",
    "int32": "INT32",
    "int64": "INT64",
}


def _kind(library: Any, dtype: str) -> Any:
    return getattr(library.data_type, _KINDS[dtype])
