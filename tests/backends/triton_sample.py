"""Problems that Triton's interpreter can compute in seconds: a seeded pairwise sample of the suite, and no GPU.

The interpreter gets bf16 wrong: products of the 16-bit patterns as integers, and truncation. ``mended`` gives it both.
"""

from __future__ import annotations

import heapq
import itertools
import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType
from unittest.mock import patch

from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.verify.suite.conformance import Truth
from gradtruth.verify.suite.inputs import Sample
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import suite

COST = 260.0  # of one recipe: rows times keys times heads in units of 1,000 scores, weighted


def mended() -> None:
    """Make Triton's interpreter right for bf16. Call before a kernel is imported."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain = builder.cast_impl

    def widened(x):
        return (x.astype(np.uint32) << 16).view(np.float32)

    def narrowed(x):
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        even = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), even)

    def cast(self, source, kind):
        one, other = source.dtype.scalar, kind.scalar
        if one == tl.bfloat16 and other == tl.float32:
            return handle(widened(source.data), other)
        if one == tl.float32 and other == tl.bfloat16:
            return handle(narrowed(source.data), other)
        return plain(self, source, kind)

    def dot(self, a, b, d, precision, imprecise):
        def operand(x):
            return widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32)

        with np.errstate(all="ignore"):
            return handle(np.matmul(operand(a), operand(b)) + d.data, d.dtype.scalar)

    def exp2(self, x):
        """A GPU's exp2 flushes what is under the smallest normal number."""
        with np.errstate(all="ignore"):
            y = np.exp2(x.data)
        return handle(np.where(y < np.float32(2.0**-126), np.float32(0), y), x.dtype)

    builder.cast_impl = cast
    builder.create_fp_ext = builder.create_fp_trunc = cast
    builder.create_fp_to_fp = lambda self, source, kind, _: cast(self, source, kind)
    builder.create_dot = dot
    builder.create_exp2 = exp2
    # Inf and NaN are looked for in results, not in the interpreter's arithmetic.
    np.seterr(all="ignore")
    _quickened(interpreter)
    _fenced(interpreter)


def _quickened(interpreter) -> None:
    """Half the time of the interpreter goes into these: integers checked for overflow, which a GPU lets wrap, and
    `triton.language` put in place anew for every function that a kernel calls."""
    builder, patch_lang = interpreter.interpreter_builder, interpreter._patch_lang
    builder.options = replace(builder.options, sanitize_overflow=False)
    seen: set[frozenset[ModuleType]] = set()

    def patched(function):
        modules = frozenset(x for x in function.__globals__.values() if isinstance(x, ModuleType))
        if modules not in seen:
            seen.add(modules)
            patch_lang(function)  # what it returns would undo it
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patched


def _fenced(interpreter) -> None:
    """Reading or writing outside of the storages that a launch was given is an error, as under memcheck."""
    import numpy as np

    builder, convert = interpreter.InterpreterBuilder, interpreter._implicit_cvt
    load, store, call = (
        builder.create_masked_load, builder.create_masked_store, interpreter.GridExecutor.__call__,
    )  # fmt: skip
    ends: dict[int, int] = {}
    fence: list[np.ndarray] = []

    def converted(given):
        if hasattr(given, "untyped_storage"):
            storage = given.untyped_storage()
            ends[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
        return convert(given)

    def launched(*given, **named):
        ends.clear()
        fence.clear()
        return call(*given, **named)

    def inside(pointers, mask):
        places = pointers.data[mask.data]
        if not fence:
            fence[:] = (
                np.array(x, dtype=np.uint64) for x in zip(*sorted(ends.items()), strict=True)
            )
        begins, limits = fence
        size = np.uint64(interpreter._get_np_dtype(pointers.get_element_ty()).itemsize)
        at = np.searchsorted(begins, places, side="right") - 1
        if ((at < 0) | (places + size > limits[at])).any():
            raise IndexError("an address outside of the tensors of the launch")

    def loaded(self, pointers, mask, *rest):
        inside(pointers, mask)
        return load(self, pointers, mask, *rest)

    def stored(self, pointers, value, mask, *rest):
        inside(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    interpreter._implicit_cvt = converted
    interpreter.GridExecutor.__call__ = launched
    builder.create_masked_load, builder.create_masked_store = loaded, stored


def cost(recipe: Recipe) -> float:
    """About how long the interpreter takes."""
    problem = recipe.problem
    rows, keys = problem.seqlen_q, problem.seqlen_kv
    share = problem.batch if problem.layout != "thd" else 1.0 / max(1, problem.batch)
    scores = share * (rows + 30) * (keys + 30) * problem.num_heads / 1000
    heavy = 1.0 + 1.5 * (problem.spec.dropout_p > 0) + 0.5 * (problem.spec.bias != "none")
    wide = (problem.head_dim_qk + problem.head_dim_v) / 256
    return scores * heavy * (1.0 + wide)


def features(recipe: Recipe) -> dict[str, object]:
    """What is covered in pairs."""
    problem, spec = recipe.problem, recipe.problem.spec
    shape = problem.bias_shape
    seen = "none" if shape is None else "".join("1" if n == 1 else "x" for n in shape)
    window = (spec.left is not None, "none" if spec.right is None else min(spec.right, 1))
    return {
        "dtype": problem.dtype, "layout": spec.layout, "packing": spec.packing, "lengths": spec.lengths,
        "window": window, "alignment": spec.alignment, "arbitrary": spec.arbitrary, "bias": spec.bias,
        "bias_shape": seen, "alibi": spec.alibi, "softcap": spec.softcap is not None,
        "softmax": spec.softmax, "dropout": spec.dropout_p > 0, "max_logit": spec.max_logit,
        "dlse": recipe.dlse, "gqa": min(problem.group_size, 3), "family": recipe.family,
        "poison": recipe.poison, "dim": (problem.head_dim_qk - 1) // 64,
        "odd": problem.head_dim_qk % 8 != 0, "unequal": problem.head_dim_qk != problem.head_dim_v,
        "holes": recipe.holes, "longer": problem.seqlen_q > problem.seqlen_kv,
        "keys": min(problem.seqlen_kv // 24, 3), "queries": min(problem.seqlen_q // 24, 3),
    }  # fmt: skip


def _pairs(recipe: Recipe) -> set[tuple]:
    return set(itertools.combinations(features(recipe).items(), 2))


def _own(
    dtype: str, layout: str, b: int, s: int, t: int, d: int, h: int = 2, g: int = 1, **more
) -> Recipe:
    """A recipe whose scores are q . k alone: the kernels' shortest path, with loops that need no mask."""
    given = {name: more.pop(name) for name in ("holes", "family", "poison") if name in more}
    problem = Problem(
        spec=Spec(layout=layout, **more), batch=b, seqlen_q=s, seqlen_kv=t, num_heads=h,
        num_gqa_groups=g, head_dim_qk=d, head_dim_v=d, dtype=dtype,
    )  # fmt: skip
    return Recipe(problem=problem, **{"poison": "nan", **given})


_CU, _PADDED = {"lengths": "cu_seqlens"}, {"lengths": "padding_mask"}


def always() -> tuple[Recipe, ...]:
    """What pairs alone leave out, because a recipe with more features has more pairs."""
    return (
        _own("float16", "bshd", 1, 70, 75, 16, poison="none"),
        _own("bfloat16", "thd", 2, 140, 140, 24, right=0, **_CU),
        _own("float32", "bshd", 2, 66, 66, 16, 4, 2, right=0, alignment="bottom_right", **_CU),
        _own(
            "float16", "sbhd", 1, 90, 90, 16, left=40, right=0, poison="none", softmax="off-by-one"
        ),
        _own("bfloat16", "bshd", 1, 40, 90, 16, softmax="learnable", max_logit=True, poison="none"),
        _own("float16", "bshd", 2, 50, 45, 16, holes=True, **_PADDED),
        _own("bfloat16", "sbhd", 2, 40, 70, 16, holes=True, right=0, family="outlier", **_PADDED),
        _own(
            "float16",
            "thd",
            3,
            120,
            150,
            16,
            2,
            2,
            family="peaked",
            right=0,
            alignment="bottom_right",
            **_CU,
        ),
    )


@cache
def selection(budget: float, seed: int = 0) -> tuple[Recipe, ...]:
    """Recipes that the interpreter can do within a budget of cost, each adding most new pairs for its cost."""
    order = [r for r in suite().recipes if fits(r.problem) and cost(r) < COST]
    random.Random(seed).shuffle(order)
    pairs = [_pairs(r) for r in order]
    chosen, left = list(always()), budget
    covered = set().union(*map(_pairs, chosen))

    def worth(at: int) -> float:
        return len(pairs[at] - covered) / (cost(order[at]) + 5.0)

    # What a recipe adds only falls as others are chosen: one whose old worth is too small need not be asked again.
    queue = [(-len(pairs[at]) / (cost(r) + 5.0), at) for at, r in enumerate(order)]
    heapq.heapify(queue)
    while queue:
        at = heapq.heappop(queue)[1]
        now = worth(at)
        if not now or cost(order[at]) > left:
            continue
        if queue and now < -queue[0][0]:
            heapq.heappush(queue, (-now, at))
            continue
        chosen.append(order[at])
        covered |= pairs[at]
        left -= cost(order[at]) + 5.0
    return tuple(chosen)


def fits(problem: Problem) -> bool:
    """The backend takes it, but for the device."""
    widest = max(problem.head_dim_qk, problem.head_dim_v)
    return problem.dtype != "float64" and widest <= 256 and problem.num_heads <= 8


def in_bf16(recipe: Recipe) -> Recipe:
    """The same in bf16."""
    return replace(recipe, problem=replace(recipe.problem, dtype="bfloat16"))


@contextmanager
def interpreted_backend() -> Iterator:
    """The backend, taking bf16 too, which is right once the interpreter is mended."""
    import gradtruth.backends.triton as room

    with patch.object(room, "_device_reasons", lambda *_: []):
        yield room.create("triton")


@contextmanager
def shared_out(on: bool = True) -> Iterator[None]:
    """As if the GPU were so large that every grid is small: work is shared out wherever it can be."""
    from gradtruth.backends.triton import arguments, schedule

    with ExitStack() as stack:
        if on:
            stack.enter_context(patch.object(arguments, "processors", lambda _: 10_000))
            stack.enter_context(patch.object(schedule, "_LEAST_BLOCKS", 1))
        yield


def sharing_matters(problem: Problem) -> bool:
    """Some kernel has something to share out."""
    return problem.group_size > 1 or max(problem.seqlen_q, problem.seqlen_kv) > 32


def examined(sample: Sample, backend: object, truth: Truth) -> list[str]:
    """What is wrong, without warnings of the interpreter about Inf and NaN."""
    from gradtruth.verify.suite.conformance import examine

    with quiet():
        return examine(sample, backend, truth)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of the interpreter about Inf and NaN."""
    import numpy as np

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sequences_fault(cases: int = 31) -> str:
    """The sequences kernel against core.extents.resolve on any content; empty when they agree."""
    import torch

    from gradtruth.backends.triton.arguments import Call
    from gradtruth.core.extents import resolve
    from gradtruth.core.spec import Spec
    from gradtruth.core.tensors import Inputs

    drawn = torch.Generator().manual_seed(0)
    for case in range(cases):
        batch = {28: 1025, 30: 300}.get(case, 1 + case % 4)
        thd, hostile = case % 2 == 0, case % 3 == 0

        def cumulated(batch=batch, hostile=hostile, case=case):
            if hostile:
                low, high = (-(2**31), 2**31 - 1) if case % 4 else (-20, 60)
                return torch.randint(low, high, (batch + 1,), generator=drawn).int()
            lengths = torch.randint(0, 20, (batch,), generator=drawn)
            return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()

        names = ["cu_seqlens_q", "cu_seqlens_kv"]
        names += ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"] * (thd and case % 4 == 0)
        q, k = (
            torch.zeros((n, 2, 16) if thd else (batch, n, 2, 16))
            for n in (50 + 9 * batch, 40 + 9 * batch)
        )
        inputs = Inputs(q=q, k=k, v=k, **{name: cumulated() for name in names})
        spec = Spec(
            layout="thd" if thd else "bshd", lengths="cu_seqlens", right=0,
            alignment="bottom_right" if case % 5 else "top_left",
        )  # fmt: skip
        problem = Problem.of(spec, inputs, max_seqlen_q=7 if case % 7 == 0 else None)
        call, expected = Call(problem, inputs), resolve(problem, inputs).pack()
        if not torch.equal(call.where[:11], expected):
            return f"sequences: extents of case {case}"
        if not thd:
            continue
        for row, block in enumerate(call.plan.schedule.blocks):
            lengths = expected[1 if row < 2 else 3]
            order = torch.arange(batch)
            if batch <= 1024:
                order = lengths.argsort(descending=True, stable=True)
            ends = ((lengths[order] + block - 1) // block).cumsum(0).int()
            if not torch.equal(call.where[15 + row // 2], order.int()):
                return f"sequences: order of case {case}"
            if not torch.equal(call.where[11 + row], ends):
                return f"sequences: tiles of case {case}"
    return ""


def hostile_faults(backend: object) -> list[str]:
    """thd with cu_seqlens of any content: no address outside of the tensors, which is an error here."""
    import torch

    from gradtruth.core.spec import Spec
    from gradtruth.core.tensors import Inputs, Wanted

    drawn = torch.Generator().manual_seed(0)
    found = []
    for case in range(4):
        q, k, v, dout = (torch.randn(20, h, 16, generator=drawn).half() for h in (2, 1, 1, 2))
        low, high = ((-(2**31), 2**31 - 1), (-10, 40))[case % 2]
        cu = [torch.randint(low, high, (4,), generator=drawn).int() for _ in range(4)]
        inputs = Inputs(
            q=q, k=k, v=v, cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1],
            cu_seqlens_q_padded=cu[2], cu_seqlens_kv_padded=cu[3],
        )  # fmt: skip
        problem = Problem.of(Spec(layout="thd", lengths="cu_seqlens", right=0), inputs)
        try:
            forward = backend.forward(problem, inputs)
            backend.backward(problem, inputs, forward, dout, None, Wanted())
        except Exception as fault:
            found.append(f"hostile lengths, case {case}: {str(fault)[:200]}")
    return found


def documents_faults(backend: object) -> list[str]:
    """Documents as a mask tensor: tiles of other documents are not visited, so a NaN there does not arrive."""
    import torch

    from gradtruth.core.spec import Spec
    from gradtruth.core.tensors import Inputs, Wanted

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 96, 2, 16, generator=generator).half() for _ in range(4)]
    document = torch.arange(96) // 32
    apart = document[:, None] != document[None, :]

    def results(q, k, v, dout, mask):
        inputs = Inputs(q=q, k=k, v=v, attention_mask=mask)
        problem = Problem.of(Spec(arbitrary=True), inputs)
        forward = backend.forward(problem, inputs)
        grads = backend.backward(problem, inputs, forward, dout, None, Wanted())
        return {"out": forward.out, **dict(grads.items())}

    found = []
    for mask in (apart[None, None], torch.stack((apart, apart))[None]):
        clean = results(*tensors, mask)
        for bad in range(3):
            here = document != bad
            given = [x.clone() for x in tensors]
            for x in given:
                x[:, ~here] = float("nan")
            found += [
                f"mask {list(mask.shape)}: a hidden tile of document {bad} was visited for {name}"
                for name, x in results(*given, mask).items()
                if not torch.equal(x[:, here], clean[name][:, here])
            ]
    return found
