"""What test_unified_kernels.py runs in a process of its own: Triton decides at import whether it interprets."""

import itertools
import mmap
import re
import sys

import torch

from penstock.unified import Graph, _draw, _gather
from penstock.unified._rows import RowType

WIDTHS = (1, 3, 16, 31, 32, 33, 100, 256, 1030)


def case(dtype, width, num_rows, *, offset=0, padding=0, seed=0):
    """A table that begins ``offset`` numbers after a page and has ``padding`` after every row."""
    generator = torch.Generator().manual_seed(seed)
    stride = width + padding
    numbers = torch.randint(-100, 100, (num_rows, stride), generator=generator).to(dtype)
    size_bytes = (offset + numbers.numel()) * numbers.element_size()
    raw = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8).view(dtype)[offset:]
    raw.copy_(numbers.view(-1))
    return raw.view(num_rows, stride)[:, :width]


def gathered(table, index, kind=None, positions=None, wraps=True, readers=256):
    kind = kind or RowType(tuple(table.shape[1:]), table.dtype, table.dtype)
    out = kind.empty(len(index)).fill_(77)
    bad = torch.zeros(1, dtype=torch.int64)
    _gather.start_gather(table, index, positions, out, bad, kind, wraps=wraps, readers=readers)
    return out, int(bad)


def values():
    """Rows of every width, type, offset and stride, with few and many readers."""
    index = torch.tensor([3, 0, 3, -1, 18, -19, 7])
    for dtype, width in itertools.product(
        (torch.float32, torch.float16, torch.int8, torch.float64, torch.bool), WIDTHS
    ):
        for offset, padding in ((0, 0), (1, 0), (0, 5), (3, 1)):
            table = case(dtype, width, 19, offset=offset, padding=padding)
            rows, bad = gathered(table, index, readers=1 + width % 3)
            assert torch.equal(rows, table[index]), (dtype, width, offset, padding)
            assert not bad
    table = torch.randn(5, 7, dtype=torch.complex64)
    assert torch.equal(gathered(table, torch.tensor([4, 1]))[0], table[[4, 1]])
    table = torch.arange(12.0)
    assert torch.equal(gathered(table, torch.tensor([4, -1]))[0], table[[4, -1]])
    table = torch.arange(40, dtype=torch.int64)[::2]
    assert torch.equal(gathered(table, torch.tensor([4, -1]))[0], table[[4, -1]])
    table = torch.randn(6, 2, 5)
    positions = torch.tensor([2, 0, 1])
    assert torch.equal(gathered(table, torch.tensor([4, 1, 5]), positions=positions)[0], table[[1, 5, 4]])
    print("equal")


def conversions():
    index = torch.tensor([3, 0, -1])
    for stored in (torch.float16, torch.bfloat16):
        table = torch.randn(9, 33).to(stored)
        rows, _ = gathered(table, index, RowType.of((33,), stored, torch.float32, None))
        assert torch.equal(rows, table[index].float())
    table = torch.randint(-128, 128, (9, 33)).to(torch.int8)
    scale = torch.rand(33)
    rows, _ = gathered(table, index, RowType.of((33,), torch.int8, None, scale))
    assert torch.equal(rows, table[index].float() * scale)
    print("equal")


def out_of_range():
    """The position is noted, and nothing is read there."""
    table = torch.randn(5, 40)
    for index, position in (([0, 5, 1], 2), ([0, 1, -6], 3), ([2**40, 1], 1)):
        rows, bad = gathered(table, torch.tensor(index))
        assert bad == position
        assert torch.equal(rows[position - 1], torch.zeros(40))
    assert gathered(table, torch.tensor([0, -1]), wraps=False)[1] == 2
    print("equal")


def lines():
    """Every load of a warp asks for whole lines, and no line is asked for twice in a row."""
    import numpy as np
    from triton.runtime import interpreter

    asked = []
    load = interpreter.InterpreterBuilder.create_masked_load

    def counting(self, pointers, mask, other, *rest):
        if pointers.data.ndim == 2:
            asked.append((pointers.data.copy(), mask.data.copy()))
        return load(self, pointers, mask, other, *rest)

    interpreter.InterpreterBuilder.create_masked_load = counting
    for dtype, width in itertools.product((torch.float32, torch.float16, torch.int8), WIDTHS):
        for offset, padding in ((0, 0), (1, 0), (0, 5)):
            table = case(dtype, width, 19, offset=offset, padding=padding)
            index, item = torch.tensor([3, 0, 18, 7, 11]), table.element_size()
            asked.clear()
            gathered(table, index)
            begins = table.data_ptr() + index * table.stride(0) * item
            needed = sum(((begins + width * item - 1) // 128 - begins // 128 + 1).tolist())
            num_lines = 0
            for pointers, mask in asked:
                for row, wanted in zip(pointers, mask, strict=True):
                    num_lines += len(np.unique(row[wanted].astype(np.int64) // 128))
            assert num_lines == needed, (dtype, width, offset, padding, num_lines, needed)
    print("equal")


def draws():
    """The kernel draws what the CPU draws."""
    generator = torch.Generator().manual_seed(0)
    graph = Graph(torch.randint(50, (2, 600), generator=generator), num_nodes=60)
    nodes = torch.arange(60)
    for fanout, replace in itertools.product((1, 3, 8, 20), (False, True)):
        for seed in (5, 2**62 - 3):
            mine = _draw.draw_by_kernel(graph, nodes, fanout, seed, replace=replace)
            theirs = _draw.draw(graph, nodes, fanout, seed, replace=replace)
            assert all(torch.equal(drawn, expected) for drawn, expected in zip(mine, theirs, strict=True)), (
                fanout,
                replace,
            )
    print("equal")


def compile_all():
    """Both kernels, in the variants that are launched, to PTX for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget

    texts = []

    def compiled(function, grid, arguments, flags, warps):
        names = {
            torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32",
            torch.float16: "*fp16", torch.bfloat16: "*bf16",
        }  # fmt: skip
        plain = [name for name in function.arg_names if name not in flags]
        signature = {
            name: names[argument.dtype] if isinstance(argument, torch.Tensor) else "i64"
            for name, argument in zip(plain, arguments, strict=True)
        }
        signature |= dict.fromkeys(flags, "constexpr")
        divisible = {
            (function.arg_names.index(name),): [["tt.divisibility", 16]]
            for name, argument in zip(plain, arguments, strict=True)
            if (argument.data_ptr() if isinstance(argument, torch.Tensor) else argument) % 16 == 0
        }
        source = triton.compiler.ASTSource(function, signature, constexprs=dict(flags), attrs=divisible)
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert ".target sm_90" in kernel.asm["ptx"]
        texts.append(kernel.asm["ptx"])
        print("compiled", function.__name__, flags, flush=True)

    _gather.launch = _draw.launch = compiled
    index = torch.tensor([3, 0, 1])
    for dtype, width in itertools.product((torch.float32, torch.int8), (3, 16, 256, 1030)):
        gathered(case(dtype, width, 19), index)
    assert re.search(r"ld\.global[.\w:]*\.v4", texts[2])  # 256 floats are read as vectors
    gathered(torch.randn(9, 32).half(), index, RowType.of((32,), torch.float16, torch.float32, None))
    gathered(torch.randn(9, 32).bfloat16(), index, RowType.of((32,), torch.bfloat16, torch.float32, None))
    gathered(torch.zeros(9, 32).to(torch.int8), index, RowType.of((32,), torch.int8, None, 0.5), positions=index)
    graph = Graph(torch.randint(50, (2, 600)), num_nodes=60)
    for fanout, replace in ((5, False), (10, True), (64, False)):
        _draw.draw_by_kernel(graph, torch.arange(60), fanout, 7, replace=replace)
    assert len(texts) == 14


if __name__ == "__main__":
    globals()[sys.argv[1]]()
