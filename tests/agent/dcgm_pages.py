"""Pages as DCGM's exporter serves them."""

UUIDS = ("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52", "GPU-0f1c2b3d-8a7e-4a51-9a0e-5d1f6f0c7b21")
BLANK = "9223372036854775794"
"""What DCGM writes for "not there" and "not supported"."""


def labels(index: int, *, more: str = "", uuid: str = "UUID") -> str:
    return (
        f'gpu="{index}",{uuid}="{UUIDS[index]}",pci_bus_id="00000000:0{index}:1E.0",device="nvidia{index}",'
        f'modelName="NVIDIA H100 80GB HBM3",{more}Hostname="gpu-1",DCGM_FI_DRIVER_VERSION="580.65.06"'
    )


def family(name: str, *values: object, text: str = "Framebuffer memory (in MiB).", **kind: str) -> str:
    """Help, type and one line for each GPU; a value of None leaves the line out."""
    full = f"DCGM_FI_DEV_{name}"
    lines = [f"{full}{{{labels(at, **kind)}}} {value}" for at, value in enumerate(values) if value is not None]
    return "\n".join([f"# HELP {full} {text}", f"# TYPE {full} gauge", *lines, ""])


def page(*, used=(70_000, 30_000), free=(10_559, 50_559), reserved=(1_000, 1_000), around: bool = True) -> bytes:
    """A machine with two GPUs; a family that is None is left out."""
    families = [family("SM_CLOCK", 1_755, 1_755, text="SM clock frequency (in MHz).")] if around else []
    families += [family("GPU_TEMP", 71, 34, text="GPU temperature (in C).")] if around else []
    for name, values in (("FB_FREE", free), ("FB_USED", used), ("FB_RESERVED", reserved)):
        if values is not None:
            families.append(family(name, *values))
    families += [family("XID_ERRORS", 0, 79, text="Value of the last XID error encountered.")] if around else []
    return "".join(families).encode()
