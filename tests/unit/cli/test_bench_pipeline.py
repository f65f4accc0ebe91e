"""What `nestpipe bench pipeline` refuses."""

import pytest

from nestpipe.cli.app import main


def run(capfd, *arguments: str):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code, capfd.readouterr()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (("--device", "tpu"), "device is 'tpu'; use cpu or cuda"),
        (("--case", "lan"), "unknown case 'lan'"),
        (("--plans", "nestd"), "unknown plan 'nestd'"),
        (("--exchange", "windows"), "unknown exchange 'windows'; use micro or window"),
        (
            ("--exchange", "window", "--set", "micro_batches=1"),
            "exchange is 'window' and micro_batches 1",
        ),
        (("--rate", "5mbit"), "add --hosts or drop --rate"),
        (("--set", "bach=4"), "did you mean batch?"),
        (("--set", "comm_dtype=float16"), "comm_dtype is 'float16'"),
        (("--hosts", "--rate", "5"), "rate is '5'; write a speed"),
    ],
)
def test_wrong_input_is_one_sentence(capfd, wrong, sentence):
    status, said = run(capfd, "bench", "pipeline", *wrong)
    assert status == 2
    assert sentence in said.err
    assert said.err.count("\n") == 1
