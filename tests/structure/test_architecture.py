"""`docs/architecture.md` is true: its rooms and files exist, and a batch does pass through them."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import nestpipe
from nestpipe import (
    DataConfig,
    Dlrm,
    DlrmConfig,
    PipelineSettings,
    SyntheticConfig,
    Trainer,
    TrainSettings,
    open_source,
)
from unit.test_layers import LAYER

PACKAGE = Path(nestpipe.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
MOST_SENTENCES = 10
MOST_FILES = {"The life of a batch": 25, "The life of a request": 20}


def section(title: str) -> str:
    return PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def files_in(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", text))


def test_a_batch_and_a_request_pass_through_few_files_that_exist():
    for title, most in MOST_FILES.items():
        files = files_in(section(title))
        missing = [file for file in files if not (PACKAGE / file).is_file()]
        assert not missing, f"{title!r} names {missing}"
        assert 10 < len(files) <= most, f"{title!r} names {len(files)} files"


def test_each_walk_is_told_in_ten_sentences():
    for title in MOST_FILES:
        told = re.sub(r"`[^`]*`|^\d+\.", "", section(title), flags=re.MULTILINE)
        assert len(re.findall(r"[.!?](?:\s|$)", told)) <= MOST_SENTENCES, title


def test_every_room_has_a_line_with_its_layer():
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    lines = re.findall(r"^\| (\d) \| `(\w+)/` \|", section("Rooms"), re.MULTILINE)
    assert {room: int(layer) for layer, room in lines} == {room: LAYER[room] for room in rooms}


def test_a_batch_passes_through_the_files_that_are_named():
    named = files_in(section("The life of a batch"))
    assert named <= files_of_a_run(), "a run never calls these"


def files_of_a_run() -> set[str]:
    """Files of the package whose functions are called while a small model trains."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    features = ("c0", "c1")
    synthetic = SyntheticConfig(samples=256, num_tables=2, num_keys=50)
    source = open_source(DataConfig(synthetic=synthetic))
    model = Dlrm(DlrmConfig(features=features, dense_features=13, dim=4))
    pipeline = PipelineSettings(plan="nested", micro_batches=2)
    before = sys.getprofile()
    threading.setprofile(note)  # the lanes are threads
    sys.setprofile(note)
    try:
        trainer = Trainer(
            model, model.tables(), TrainSettings(batch=32, device="cpu", pipeline=pipeline)
        )
        trainer.fit(source)
        trainer.close()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return {file.removeprefix(f"{PACKAGE}/") for file in called}
