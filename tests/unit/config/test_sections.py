"""Learning rates as a function of the step, against torch's schedulers."""

from pathlib import Path

import pytest
import torch

from nestpipe.config import RateOptions
from nestpipe.config.sections import (
    first_match,
    is_authorised,
    is_loopback,
    rates_of,
    read_token,
    refuse_idle,
    require_token,
)
from nestpipe.errors import ConfigError

STEPS, LR = 40, 0.3


def torch_rates(options: RateOptions) -> list[float]:
    """The rates of `STEPS` steps by torch: a warm-up, then what follows it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    of_torch = torch.optim.lr_scheduler
    after = {
        "constant": lambda: of_torch.ConstantLR(optimizer, 1.0),
        "cosine": lambda: of_torch.CosineAnnealingLR(
            optimizer, options.decay_steps, eta_min=LR * options.final
        ),
        "step": lambda: of_torch.StepLR(optimizer, options.decay_steps, options.decay),
    }[options.schedule]
    scheduler = after()
    if warm := options.warmup_steps:
        rising = of_torch.LinearLR(optimizer, 1 / warm, total_iters=max(1, warm - 1))
        scheduler = of_torch.SequentialLR(optimizer, [rising, scheduler], milestones=[warm])
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup_steps", [0, 2, 7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "cosine", "decay_steps": STEPS},
        {"schedule": "cosine", "decay_steps": STEPS - 2, "final": 0.25},
        {"schedule": "step", "decay_steps": 6},
        {"schedule": "step", "decay_steps": 1, "decay": 0.9},
    ],
)
def test_rates_are_those_of_torch(options, warmup_steps):
    rate = RateOptions(warmup_steps=warmup_steps, **options)
    mine, theirs = [LR * rate.factor(step) for step in range(1, STEPS + 1)], torch_rates(rate)
    if rate.schedule == "cosine":  # torch's rises again after its end
        end = min(STEPS, warmup_steps + rate.decay_steps + 1)
        assert mine[end:] == pytest.approx([LR * rate.final] * (STEPS - end))
        mine, theirs = mine[:end], theirs[:end]
    assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_a_rate_is_a_function_of_the_step_alone():
    rate = RateOptions(schedule="cosine", decay_steps=10, warmup_steps=3)
    forwards = [rate.factor(step) for step in range(1, 20)]
    assert [rate.factor(step) for step in reversed(range(1, 20))] == forwards[::-1]
    assert RateOptions().factor(12345) == 1.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "cosine"}, "decay_steps is 0 and schedule 'cosine'; say in how many"),
        ({"schedule": "cosinus"}, "schedule is 'cosinus'; did you mean 'cosine'?"),
        ({"warmup_steps": -1}, "warmup_steps is -1; give 0"),
        ({"schedule": "step", "decay_steps": 5, "decay": 0.0}, "decay is 0.0; give a number above"),
        ({"final": 1.5}, "final is 1.5; give a number from 0 to 1"),
        ({"rates": ("users",)}, "rates has 'users'; write a name or pattern and a rate"),
        ({"rates": ("users=fast",)}, "rates has 'users=fast'; write"),
        ({"rates": ("users=-1",)}, "rates has 'users=-1'; write"),
    ],
)
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(ConfigError) as refused:
        RateOptions(**given)
    assert words in str(refused.value)


def test_the_first_pattern_that_fits_counts():
    rates = rates_of(("users=1", "u*=2", " items = 0.5"))
    assert [first_match(rates, name) for name in ("users", "urls", "items", "x")] == [
        *(1.0, 2.0, 0.5),
        None,
    ]


def test_a_pattern_that_fits_nothing_is_refused():
    refuse_idle("rows.rates", ["u*"], ["users"], "table")
    with pytest.raises(ConfigError, match=r"rows.rates has 'user', which fits no table; there are"):
        refuse_idle("rows.rates", ["user"], ["users", "items"], "table")


TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1"])
def test_this_machine_alone_needs_no_token(host: str):
    assert is_loopback(host)
    require_token(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_what_others_can_reach_needs_a_token(host: str):
    with pytest.raises(ConfigError, match="NESTPIPE_TOKEN"):
        require_token(host, None)
    require_token(host, TOKEN)


@pytest.mark.parametrize(
    ("header", "right"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer {TOKEN}", True),
        (f"Basic {TOKEN}", False),
        (f"Bearer {TOKEN}x", False),
        ("Bearer ", False),
        ("Bearer", False),
        (TOKEN, False),
        ("", False),
        ("Bearer ü", False),
    ],
)
def test_only_the_token_lets_a_caller_in(header: str, right: bool):
    assert is_authorised(header.encode(), TOKEN) is right
    assert is_authorised(header.encode(), None)


def test_no_header_is_no_token():
    assert not is_authorised(None, TOKEN)


def test_a_file_goes_before_the_environment(tmp_path: Path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert read_token(tmp_path / "token", {"NESTPIPE_TOKEN": "x" * 20}) == TOKEN
    assert read_token(None, {"NESTPIPE_TOKEN": "x" * 20}) == "x" * 20
    assert read_token(None, {}) is None


@pytest.mark.parametrize("text", ["", "tiny", "with a\nline break in it", "ü" * 20])
def test_a_token_that_is_none_is_refused_without_being_shown(tmp_path: Path, text: str):
    (tmp_path / "token").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_token(tmp_path / "token", {})
    assert not text or text not in str(refused.value)


def test_a_token_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="readable"):
        read_token(tmp_path / "nothing", {})
