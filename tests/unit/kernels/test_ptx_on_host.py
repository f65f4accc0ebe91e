"""The machine that runs PTX for tests: a small kernel by hand, and mistakes that it has to see."""

from __future__ import annotations

import numpy as np
import pytest

from support.ptx_on_host import Memory, TensorMap, Wrong, run

ROWS, COLUMNS = 64, 64
SUMS = ", ".join(f"%r{n}" for n in range(10, 42))
ZEROS = "\n".join(f"mov.b32 %r{n}, 0;" for n in range(10, 42))
KERNEL = f"""
.version 8.7
.target sm_90a
.visible .entry squares(
    .param .align 64 .b8 squares_param_0[128],
    .param .u64 squares_param_1
)
.reqntid 128
.maxnreg 128
{{
    .reg .pred %p<4>;
    .reg .b32 %r<60>;
    .reg .b64 %rd<10>;
    mov.u32 %r1, %tid.x;
    setp.eq.b32 %p1, %r1, 0;
    mov.b32 %r2, 65536;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
    bar.sync 0, 128;
    mov.b64 %rd1, squares_param_0;
    cvta.param.u64 %rd2, %rd1;
    mov.b32 %r3, 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 8192;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r3], [%rd2, {{%r3, %r3}}], [%r2];
    {{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.shared.b64 done, [%r2], %r3;
        @!done bra.uni again;
    }}
    {ZEROS}
    mov.b32 %r4, 0;
    mov.b64 %rd3, 4611686293305294848;
$next:
    wgmma.fence.sync.aligned;
    setp.gt.s32 %p2, %r4, 0;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
        {{{SUMS}}}, %rd3, %rd3, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    add.s64 %rd3, %rd3, 2;
    add.s32 %r4, %r4, 1;
    setp.lt.s32 %p3, %r4, 4;
    @%p3 bra $next;
    ld.param.b64 %rd4, [squares_param_1];
    mad.wide.u32 %rd5, %r1, 128, %rd4;
    {"".join(f"st.global.b32 [%rd5+{4 * n}], %r{n + 10};" for n in range(32))}
    ret;
}}
"""


def products(kernel: str = KERNEL, swizzle: int = 128, seed: int = 0) -> tuple[np.ndarray, ...]:
    """What the kernel writes of the products of all pairs of 50 rows, and what is right."""
    drawn = np.random.default_rng(0).integers(-8, 8, (50, COLUMNS)).astype(np.float32)
    memory = Memory(1 << 18)
    bits = (drawn.view(np.uint32) >> 16).astype(np.uint16)  # exact: small whole numbers
    rows = TensorMap(memory.put(bits), (COLUMNS, 50), (2, 2 * COLUMNS), (COLUMNS, ROWS), swizzle)
    out = np.zeros((128, 32), np.float32)
    address = memory.put(out)
    assert list(run(kernel, memory, [rows, address], 1, seed))
    held = memory.get(address, out)
    found = np.full((ROWS, ROWS), np.nan, np.float32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for n in range(32):
            row = 16 * warp + lane // 4 + 8 * (n // 2 % 2)
            found[row, 8 * (n // 4) + lane % 4 * 2 + n % 2] = held[thread, n]
    wanted = np.zeros((ROWS, ROWS), np.float32)
    wanted[:50, :50] = drawn @ drawn.T
    return found, wanted


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_and_products_of_a_warp_group(seed: int):
    found, wanted = products(seed=seed)
    assert np.array_equal(found, wanted)  # rows past the tensor's end are zeros


def without(line: str) -> str:
    assert KERNEL.count(line) == 1
    return KERNEL.replace(line, "")


@pytest.mark.parametrize(
    ("kernel", "sentence"),
    [
        (KERNEL.replace("[%r2], 8192", "[%r2], 8200"), "deadlock"),
        (without("@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;"), "a barrier that is none"),
        (without("wgmma.wait_group.sync.aligned 0;"), "under a product|after its fence"),
        (without("wgmma.fence.sync.aligned;"), "written after its fence"),
        (
            KERNEL.replace("$next:", "st.shared.b32 [%r3], %r2;\n$next:"),
            "stored to without a fence",
        ),
        (KERNEL.replace("@%p3 bra", "@%p1 bra"), "different ways"),
        (KERNEL.replace("[%rd5+124]", "[%rd5+99999]"), "outside of all tensors|multiple of"),
        (KERNEL.replace("bar.sync 0, 128;", "bar.sync 0, 96;"), "more arrivals|deadlock|barrier"),
        (KERNEL.replace("mov.b32 %r4, 0;", ""), "before it has a value"),
    ],
)
def test_mistakes_are_seen(kernel: str, sentence: str):
    with pytest.raises(Wrong, match=sentence):
        products(kernel)


def test_another_swizzle_gives_other_products():
    found, wanted = products(swizzle=0)
    assert not np.array_equal(found, wanted)
