"""What runs the code under measurement: which interpreter, built how, and whether the path of a request is compiled.

Import it before the code: where there is a build of these sources, they are loaded from it from here on, as agents do.
"""

import platform
import sysconfig

from controlplane.compiled.finder import use_compiled

COMPILED = use_compiled()


def described() -> str:
    """One line for the head of a table."""
    options = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    # What a distribution did beyond the options is not told.
    built = f"configured {'with' if '--enable-optimizations' in options else 'without'} --enable-optimizations"
    path = "compiled" if COMPILED else "interpreted (`make compile` compiles it)"
    return f"Python {platform.python_version()}, {built}; the path of a request is {path}"
