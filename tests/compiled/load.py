"""A plugin for pytest: loads what is compiled before anything else does, and says so at the end."""

from controlplane.compiled.finder import use_compiled

COMPILED = use_compiled()


def pytest_terminal_summary(terminalreporter) -> None:
    import controlplane.core.scheduling as scheduling

    terminalreporter.write_line(f"compiled: {COMPILED} {scheduling.__file__}")
