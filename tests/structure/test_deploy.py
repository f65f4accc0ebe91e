"""What is handed out to run elsewhere: images, manifests, scripts, and the pages that tell of them.

None of it can be run here; linters and schemas read it, and its commands and keys are our own.
"""

import re
import shlex
import subprocess
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from nestpipe.cli.app import command_tree, main
from nestpipe.config import build
from nestpipe.train.job import JobConfig
from support.programs import find

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
KUBERNETES = "1.31"


def program(name: str) -> str:
    found = find(name)
    assert found is not None
    return found


@pytest.mark.needs("hadolint")
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_is_described_as_hadolint_wants_it(file: Path):
    said = subprocess.run([program("hadolint"), file], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_has_the_wheel_and_the_torch_of_this_tree(file: Path):
    text = file.read_text()
    assert "--mount=type=bind,source=dist,target=/dist" in text
    # The file itself: by its name alone pip might take another index's.
    assert """set -- /dist/nestpipe-*_"$(uname -m)".whl && pip install "$1[serve,train]\"""" in text
    torch = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    assert torch[1] in text


@pytest.mark.needs("shellcheck")
def test_shell_scripts_pass_shellcheck():
    scripts = [DEPLOY / "train.sbatch", ROOT / "tools/gpu_session.sh"]
    said = subprocess.run(
        [program("shellcheck"), *scripts], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_are_what_kubernetes_takes(file: Path):
    yaml = pytest.importorskip("yaml")
    validate = pytest.importorskip("kubernetes_validate").validate
    documents = list(yaml.safe_load_all(file.read_text()))
    assert documents
    for document in documents:
        validate(document, KUBERNETES, strict=True)
    assert KUBERNETES in (ROOT / "docs/cluster.md").read_text()


def commands() -> list[str]:
    """Every command line of `nestpipe` in the folder, as one line."""
    yaml = pytest.importorskip("yaml")
    found = [(DEPLOY / "train.sbatch").read_text().replace("\\\n", " ")]
    found = [
        line.partition(" # ")[0].rstrip("& ")
        for line in found[0].splitlines()
        if re.match(r"nestpipe |.* -m nestpipe ", line)
    ]
    for file in MANIFESTS:
        for document in yaml.safe_load_all(file.read_text()):
            template = document["spec"].get("template", {}).get("spec", {})
            for container in [*template.get("initContainers", []), *template.get("containers", [])]:
                words = [*container.get("command", ["nestpipe"]), *container["args"]]
                found.append(shlex.join(words))
    return found


def test_commands_name_options_that_exist():
    from torch.distributed.run import get_args_parser

    known = {
        name: {word for option in command.params for word in option.opts}
        for name, command in command_tree().commands.items()
    }
    of_torchrun = set(get_args_parser()._option_string_actions)
    assert len(commands()) == 5
    for line in commands():
        before, _, after = line.partition("nestpipe ")
        name, *words = shlex.split(after.replace("$config", "config.toml"))
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= known[name], line
        flags = set(re.findall(r"(?<= )--[\w-]+", before.partition("torchrun")[2]))
        assert flags <= of_torchrun, line


def test_a_wrong_config_fails_the_job_and_is_not_started_again(capsys, tmp_path):
    """torchrun exits with 1 whatever its ranks do, so a container of its own tells."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((DEPLOY / "train.yaml").read_text())
    (job,) = (document for document in documents if document["kind"] == "Job")
    (check,) = job["spec"]["template"]["spec"]["initContainers"]
    (codes,) = (
        rule["onExitCodes"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if rule["action"] == "FailJob"
    )
    assert codes["containerName"] == check["name"]
    for text, status in (("[run]\nbatch = 512\n", 0), ("[run]\nbatchs = 512\n", 2)):
        config = tmp_path / "config.toml"
        config.write_text(text)
        words = [word.replace("/config/config.toml", str(config)) for word in check["args"]]
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert int(stop.value.code or 0) == status
        assert (status in codes["values"]) == (status == 2)
        said = capsys.readouterr()
        assert "a config that train takes" in said.out if status == 0 else "batchs" in said.err


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return import_module("cluster_trial")


def test_the_guide_has_the_lines_that_the_trial_runs(cluster):
    page = (ROOT / "docs/cluster.md").read_text()
    train, compare = cluster.lines(page)
    assert train.startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 ")
    assert train.endswith("-m nestpipe train cluster.toml --resume auto")
    assert compare == "nestpipe checkpoint diff runs/straight runs/cluster"
    (name, text), = cluster.trial.files(page).items()  # fmt: skip
    config = build(JobConfig, tomllib.loads(text))
    assert name == "cluster.toml"
    assert config.run.checkpoint == "runs/cluster"
    assert config.run.checkpoint_every


@pytest.mark.parametrize(("dtype", "w"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
@pytest.mark.parametrize(("optimizer", "state"), [("rowwise_adagrad", 1), ("adam", 64)])
def test_the_memory_of_rows_is_what_the_guide_says(dtype, w, optimizer, state):
    import torch

    from nestpipe.models import Dlrm, DlrmConfig
    from nestpipe.train import RowSettings, Trainer, TrainSettings

    rows, dim = 400_000, 32
    model = Dlrm(DlrmConfig(features=("items",), dim=dim))
    tables = [replace(table, dtype=dtype) for table in model.tables()]
    trainer = Trainer(model, tables, TrainSettings(rows=RowSettings(optimizer=optimizer)))
    (store,) = trainer.stores
    store.scatter(torch.arange(rows), [rows], torch.zeros(rows, dim + state))
    row = 16 * -(-(w * dim + 4 * state) // 16)
    taken = store.num_bytes()
    trainer.close()
    chunk = 32 << 20  # "at most one unfilled chunk per table"
    assert rows * (row + 23) <= taken <= rows * (row + 46) + chunk
