"""What hatchling calls when kvkeep is built or installed: compiles the copies into the package.

A machine without a C compiler gets a package without them, which copies with numpy.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

import build_rows


class RowsHook(BuildHookInterface):
    """Adds ``_rows.native.so`` to a wheel, and the platform to its name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build in place; ``version`` is "editable" or "standard"."""
        try:
            build_rows.build()
        except build_rows.BuildError as error:
            self.app.display_warning(f"kvkeep will copy with numpy: {error}")
            return
        library = build_rows.LIBRARY.relative_to(Path(self.root).resolve())
        build_data["artifacts"].append(f"/{library.as_posix()}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
