"""Compiles the native part into the wheel, one library for each level of processor.

Without a compiler, or on a machine that `LEVELS` does not know, the wheel has the sources alone and
they are compiled on first use. `tools/make_wheels.py` names the compiler and the machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibraries(BuildHookInterface):
    """Hatchling's hook: what it adds to `build_data` goes into the wheel."""

    folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is packed; an editable install builds on first use."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from nestpipe.errors import ConfigError

        try:
            machine, libraries = self._compiled()
        except ConfigError as error:
            self.app.display_warning(f"the wheel has no native library: {error}")
            return
        for path in libraries:
            build_data["force_include"][str(path)] = f"nestpipe/kernels/shipped/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"

    def _compiled(self) -> tuple[str, list[Path]]:
        from nestpipe.errors import ConfigError
        from nestpipe.kernels import build

        machine = os.environ.get("NESTPIPE_MACHINE", platform.machine())
        if sys.platform != "linux" or machine not in build.LEVELS:
            raise ConfigError(f"{sys.platform} on {machine!r} is not one that wheels are made for")
        compiler = build.find_compiler()
        self.folder = folder = Path(tempfile.mkdtemp(prefix="nestpipe-wheel-"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [
                pool.submit(build.build_shipped, compiler, machine, level, folder)
                for level in build.LEVELS[machine]
            ]
            return machine, [library.result() for library in made]

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled once the wheel has it."""
        if self.folder is not None:
            shutil.rmtree(self.folder)
