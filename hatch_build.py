"""Compiles the C sources into wheels, so that they are fast where there is no compiler.

The libraries are loaded by ctypes and need no Python: one wheel serves all versions (``py3-none-<platform>``). An
editable installation has none, since it compiles at first use, for its own machine. Without a C compiler the wheel is
pure Python, and works.
"""

import platform
import runpy
import shlex
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BASELINES = {"x86_64": ("-march=x86-64", "-mtune=generic"), "aarch64": ("-march=armv8-a",)}
"""What every machine of a platform runs, whatever the compiler takes by default."""


NUMBERS = {"remat": "remat/_decision.py"}
"""Per source, the file of ``src/penstock`` whose ``NUMBERS_OF_C`` it shares. Importing its room would need PyTorch."""


class NativeLibraries(BuildHookInterface):
    """Adds ``penstock/native/<name>.so`` for each source there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform."""
        if version == "editable" or not sys.platform.startswith("linux"):
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from penstock.native._compiler import FLAGS, WITH_THREADS, compile_to, find_compiler, read_source, with_numbers

        compiler = find_compiler()
        if compiler is None:
            self.app.display_warning("no C compiler was found: the wheel is pure Python, and slower")
            return
        self.app.display_info(f"compiling with {shlex.join(compiler)}")
        self.folder = tempfile.TemporaryDirectory()  # until finalize
        flags = (*FLAGS, *WITH_THREADS, "-fno-trapping-math", *BASELINES.get(platform.machine(), ()))
        package = Path(self.root) / "src" / "penstock"
        for source in sorted((package / "native").glob("*.c")):
            shared = NUMBERS.get(source.stem)
            numbers = runpy.run_path(str(package / shared))["NUMBERS_OF_C"] if shared else ()
            library = Path(self.folder.name) / f"{source.stem}.so"
            compile_to(compiler, flags, with_numbers(read_source(source), numbers), source.stem, library)
            build_data["force_include"][str(library)] = f"penstock/native/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what was compiled."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
