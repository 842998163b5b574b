"""Loads modules from the build of the present sources, where there is one; else nothing changes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from controlplane.compiled.modules import BUILDS, MODULES, ROOT, digest


class CompiledFinder:
    """Finds the modules of one build; a name that is not in it is left to Python."""

    def __init__(self, folder: Path) -> None:
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        self.places = {
            f"controlplane.{name}": folder / "controlplane" / (name.replace(".", "/") + suffix) for name in MODULES
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self.places.get(fullname)
        if place is None:
            return None
        loader = importlib.machinery.ExtensionFileLoader(fullname, str(place))
        return importlib.util.spec_from_file_location(fullname, place, loader=loader)


def build_of_these_sources(root: Path = ROOT, builds: Path = BUILDS) -> Path | None:
    """Folder of the build that fits, None without one."""
    if not builds.is_dir():
        return None
    folder = builds / digest(root)
    return folder if folder.is_dir() else None


def use_compiled() -> bool:
    """Load from the build of these sources from now on; False where there is none. Call it before other imports."""
    folder = build_of_these_sources()
    if folder is None:
        return False
    # What all modules of a build share lies beside them, under a name of its own.
    sys.path.append(str(folder))
    sys.meta_path.insert(0, CompiledFinder(folder))
    return True
