"""HSTU without gradients: other attention, a prefix in parts, the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nestpipe.kernels.attention import inference as attention_forward
from nestpipe.models import Hstu, HstuConfig, Prefix, PrefixParts, Tokens
from nestpipe.models.hstu import HstuBlock

CONFIG = HstuConfig(
    blocks=3, heads=2, dim=8, attention_dim=4, value_dim=6, max_len=8, position_buckets=4,
    time_buckets=5,
)  # fmt: skip
PAST, NEW, TARGETS = [40, 0, 7], [5, 3, 20], [2, 3, 9]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Hstu:
    """In blocks of a few rows, so that there are several."""
    monkeypatch.setattr(attention_forward, "_ROWS", (4, 4))
    monkeypatch.setattr(attention_forward, "_SCORES_OF_A_RUN", 0)
    torch.manual_seed(0)
    return Hstu(CONFIG).double()


@pytest.fixture(name="samples")
def make_samples() -> list[tuple[Tensor, Tensor]]:
    """Rows and times of each sample, past and new."""
    generator = torch.Generator().manual_seed(1)
    lengths = [old + new for old, new in zip(PAST, NEW, strict=True)]
    return [
        (
            torch.randn(length, CONFIG.dim, generator=generator, dtype=torch.float64),
            torch.randint(0, 50, (length,), generator=generator),
        )
        for length in lengths
    ]


def tokens(times: list[Tensor], targets: list[int] | None = None) -> Tokens:
    lengths_B = torch.tensor([len(part) for part in times])
    targets_B = None if targets is None else torch.tensor(targets)
    return Tokens(lengths_B, targets_B, torch.cat(times))


def parts_of(encoder: Hstu, samples) -> PrefixParts:
    """Made for each sample on its own."""
    made: list[Prefix] = []
    for (rows, times), old in zip(samples, PAST, strict=True):
        made.append(encoder.prefix(rows[:old], tokens([times[:old]])))
    return PrefixParts(
        [torch.stack(prefix.keys) for prefix in made],
        [torch.stack(prefix.values) for prefix in made],
        [times[:old] for (_, times), old in zip(samples, PAST, strict=True)],
    )


def new_rows(encoded: Tensor) -> Tensor:
    lengths = [count for pair in zip(PAST, NEW, strict=True) for count in pair]
    return torch.cat(encoded.split(lengths)[1::2])


def test_it_does_not_matter_whether_gradients_are_wanted(encoder, samples):
    rows, about = torch.cat([r for r, _ in samples]), tokens([t for _, t in samples], TARGETS)
    with_gradients = encoder(rows, about)
    assert with_gradients.requires_grad
    with torch.inference_mode():
        assert_same(encoder(rows, about), with_gradients.detach())


def test_parts_of_a_prefix_are_as_good_as_the_whole(encoder, samples):
    rows, about = torch.cat([r for r, _ in samples]), tokens([t for _, t in samples], TARGETS)
    whole = encoder(rows, about).detach()
    with torch.no_grad():
        parts = parts_of(encoder, samples)
        late = torch.cat([r[old:] for (r, _), old in zip(samples, PAST, strict=True)])
        times = [t[old:] for (_, t), old in zip(samples, PAST, strict=True)]
        found = encoder(late, tokens(times, TARGETS), parts)
    assert_same(found, new_rows(whole))


def test_what_follows_parts_is_kept_alone_and_joins_them(encoder, samples):
    rows, times = samples[0]
    with torch.no_grad():
        whole = encoder.prefix(rows, tokens([times]))
        first = encoder.prefix(rows[:30], tokens([times[:30]]))
        keys, values = torch.stack(first.keys), torch.stack(first.values)
        parts = PrefixParts([keys], [values], [times[:30]])
        rest = encoder.prefix(rows[30:], tokens([times[30:]]), parts)
    assert rest.lengths_B.tolist() == [len(rows) - 30]
    assert_same(torch.cat([keys, torch.stack(rest.keys)], 1), torch.stack(whole.keys))
    assert_same(torch.cat([values, torch.stack(rest.values)], 1), torch.stack(whole.values))
    assert rest.times_T is not None
    assert torch.equal(rest.times_T, times[30:])


def test_parts_are_refused_where_gradients_are_wanted(encoder, samples):
    with torch.no_grad():
        parts = parts_of(encoder, samples)
    rows, times = samples[0]
    with pytest.raises(AssertionError, match="without gradients"):
        encoder(rows, tokens([times, times[:0], times[:0]]), parts)


def every_block(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Keys and values that the blocks give in a call of the whole encoder from now on."""
    seen: list[tuple[Tensor, Tensor]] = []
    forward = HstuBlock.forward

    def kept_forward(block: HstuBlock, *given, **named):
        out, keys, values = forward(block, *given, **named)
        assert keys is not None
        assert values is not None
        seen.append((keys, values))
        return out, keys, values

    monkeypatch.setattr(HstuBlock, "forward", kept_forward)
    return seen


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_prefix_without_its_last_output_has_the_same_bits(encoder, samples, dtype, parts: bool):
    rows, times = samples[0]
    encoder, rows = encoder.to(dtype), rows.to(dtype)
    with torch.no_grad():
        past = encoder.prefix(rows[:30], tokens([times[:30]]))
        if parts:
            stacked = torch.stack(past.keys), torch.stack(past.values)
            past = PrefixParts([stacked[0]], [stacked[1]], [times[:30]])
        with pytest.MonkeyPatch.context() as patch:
            seen = every_block(patch)
            encoder(rows[30:], tokens([times[30:]]), past)
        prefix = encoder.prefix(rows[30:], tokens([times[30:]]), past)
    assert len(seen) == len(prefix.keys) == CONFIG.blocks
    for (keys, values), k_THA, v_THV in zip(seen, prefix.keys, prefix.values, strict=True):
        assert torch.equal(keys, k_THA)
        assert torch.equal(values, v_THV)


def test_the_last_block_of_a_prefix_attends_to_nothing(encoder, samples, monkeypatch):
    seen = every_block(monkeypatch)
    rows, times = samples[0]
    encoder.prefix(rows, tokens([times]))
    assert len(seen) == CONFIG.blocks - 1


def test_a_block_waits_for_its_past_and_not_for_that_of_later_ones(encoder, samples, monkeypatch):
    order: list[str] = []
    forward = HstuBlock.forward

    def said_forward(block: HstuBlock, *given, **named):
        order.append("block")
        return forward(block, *given, **named)

    monkeypatch.setattr(HstuBlock, "forward", said_forward)
    with torch.no_grad():
        made = parts_of(encoder, samples)
        parts = PrefixParts(
            made.keys, made.values, made.times, lambda block: order.append(f"wait {block}")
        )
        order.clear()
        late = torch.cat([r[old:] for (r, _), old in zip(samples, PAST, strict=True)])
        times = [t[old:] for (_, t), old in zip(samples, PAST, strict=True)]
        encoder(late, tokens(times), parts)
    assert order == ["wait 0", "block", "wait 1", "block", "wait 2", "block"]
