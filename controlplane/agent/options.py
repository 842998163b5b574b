"""What the agent is told on its command line; every mistake has a sentence that says what to do."""

from __future__ import annotations

import argparse
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from controlplane.agent.backends.curves import CURVES
from controlplane.agent.errors import UsageError
from controlplane.agent.spool_store import DEFAULT_BYTES_MAX

BACKENDS = ("sim", "openai", "triton")
WITH_UPSTREAM = ("openai", "triton")
NAME_CHARS_MAX = 63


@dataclass(frozen=True, kw_only=True)
class Address:
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Checked options."""

    control_plane: str
    name: str
    state_dir: Path
    backend: str
    slots: int
    listen: Address
    admin_listen: Address
    enrol_token: str = ""
    upstream: str = ""
    upstream_priority: bool = False
    triton_metrics: str = ""
    """Whole address of Triton's metrics; empty is port 8002 of the upstream's host."""
    triton_text_input: str = "TEXT"
    triton_embedding_output: str = "EMBEDDING"
    dcgm_metrics: str = ""
    """Whole address of DCGM's exporter; empty: GPU memory is what the inference server's own metrics tell."""
    dcgm_gpus: tuple[str, ...] = ()
    """Indexes or UUIDs of the inference server's GPUs; empty is every GPU of that page."""
    broker: str = ""
    insecure: bool = False
    seed: int = 0
    sim_gpu: str = "h100"
    sim_speed: float = 1.0
    sim_batch_fixed_us: int = 4_000
    sim_batch_input_us: int = 500
    drain_timeout_s: float = 10.0
    spool_bytes_max: int = DEFAULT_BYTES_MAX
    otlp_endpoint: str = ""
    """Whole address that traces are sent to; empty is no tracing."""
    otlp_sample: float = 1.0

    @property
    def address(self) -> str:
        return str(self.listen)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m controlplane.agent`. Parsing raises UsageError."""
    made = _Parser(
        prog="python -m controlplane.agent", description="Serve inference next to the GPUs under Flexband's policy."
    )
    made.add_argument("--control-plane", required=True, metavar="URL", help="address of the control plane")
    made.add_argument("--enrol-token", default="", metavar="TOKEN", help="one-time token; needed on first start only")
    made.add_argument("--name", required=True, help="name of this agent, unique among those in use")
    made.add_argument("--state-dir", required=True, type=Path, metavar="DIR", help="key, policy and spool live here")
    made.add_argument("--backend", choices=BACKENDS, default="sim", help="what runs the requests (default: sim)")
    made.add_argument("--upstream", default="", metavar="URL", help="inference server of --backend openai or triton")
    made.add_argument("--upstream-priority", action="store_true", help="send vLLM's priority with each request")
    made.add_argument("--triton-metrics", default="", metavar="URL", help="default: port 8002 of the upstream's host")
    made.add_argument("--triton-text-input", default="TEXT", metavar="NAME", help="tensor that takes texts to embed")
    made.add_argument("--triton-embedding-output", default="EMBEDDING", metavar="NAME", help="tensor with embeddings")
    made.add_argument("--dcgm-metrics", default="", metavar="URL", help="DCGM's exporter, asked for GPU memory")
    made.add_argument("--dcgm-gpus", default="", metavar="LIST", help="its GPUs, such as 0,1 (default: all)")
    made.add_argument("--slots", type=int, default=1, help="slots this machine offers (default: 1)")
    made.add_argument("--listen", default="127.0.0.1:9001", metavar="HOST:PORT", help="where tenants connect")
    made.add_argument("--admin-listen", default="127.0.0.1:9101", metavar="HOST:PORT", help="metrics and health")
    made.add_argument(
        "--broker", default="", metavar="URL", help="broker for nudges; without it reports alone converge"
    )
    made.add_argument("--insecure", action="store_true", help="allow http to a control plane that is not loopback")
    made.add_argument("--seed", type=int, default=0, help="seed of the simulated backend")
    made.add_argument("--sim-gpu", choices=sorted(CURVES), default="h100", help="curve of the simulated backend")
    made.add_argument("--sim-speed", type=float, default=1.0, help="how much faster than real time; 0 is infinitely")
    made.add_argument("--sim-batch-fixed", type=float, default=4.0, metavar="MS", help="time of a simulated batch")
    made.add_argument("--sim-batch-input", type=float, default=0.5, metavar="MS", help="and of each input in it")
    made.add_argument("--drain-timeout", type=float, default=10.0, metavar="S", help="bound of an orderly end")
    made.add_argument("--spool-max-mib", type=int, default=DEFAULT_BYTES_MAX >> 20, metavar="MIB", help="spool's bound")
    made.add_argument("--otlp-endpoint", default="", metavar="URL", help="collector that traces go to by OTLP/HTTP")
    made.add_argument("--otlp-sample", type=float, default=1.0, metavar="RATE", help="share of requests to trace")
    return made


def parse(arguments: list[str]) -> Options:
    """Checked options. Raises UsageError."""
    given = parser().parse_args(arguments)
    _check_control_plane(given.control_plane, insecure=given.insecure)
    if given.slots < 1:
        raise UsageError(f"--slots must be 1 or more, not {given.slots}")
    if not 1 <= len(given.name) <= NAME_CHARS_MAX:
        raise UsageError(f"--name must have 1 to {NAME_CHARS_MAX} characters, not {len(given.name)}")
    _check_backend(given)
    if given.sim_speed < 0:
        raise UsageError(f"--sim-speed must be 0 (infinitely fast) or more, not {given.sim_speed}")
    if given.drain_timeout < 0 or given.spool_max_mib < 1:
        raise UsageError("--drain-timeout must be 0 or more and --spool-max-mib 1 or more")
    if not 0 <= given.otlp_sample <= 1:
        raise UsageError(f"--otlp-sample must be 0 (no request) to 1 (each one), not {given.otlp_sample}")
    return Options(
        control_plane=given.control_plane.rstrip("/"),
        name=given.name,
        state_dir=given.state_dir,
        backend=given.backend,
        slots=given.slots,
        listen=address(given.listen, "--listen"),
        admin_listen=address(given.admin_listen, "--admin-listen"),
        enrol_token=given.enrol_token,
        upstream=given.upstream.rstrip("/"),
        upstream_priority=given.upstream_priority,
        triton_metrics=given.triton_metrics,
        triton_text_input=given.triton_text_input,
        triton_embedding_output=given.triton_embedding_output,
        dcgm_metrics=with_path(given.dcgm_metrics, "/metrics") if given.dcgm_metrics else "",
        dcgm_gpus=tuple(name for name in map(str.strip, given.dcgm_gpus.split(",")) if name),
        broker=given.broker,
        insecure=given.insecure,
        seed=given.seed,
        sim_gpu=given.sim_gpu,
        sim_speed=given.sim_speed,
        sim_batch_fixed_us=round(given.sim_batch_fixed * 1000),
        sim_batch_input_us=round(given.sim_batch_input * 1000),
        drain_timeout_s=given.drain_timeout,
        spool_bytes_max=given.spool_max_mib << 20,
        otlp_endpoint=traces_url(given.otlp_endpoint) if given.otlp_endpoint else "",
        otlp_sample=given.otlp_sample,
    )


def traces_url(endpoint: str) -> str:
    """Where an OTLP/HTTP collector takes traces: its address with `/v1/traces`, or as given with a path of its own."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--otlp-endpoint must be a URL like http://127.0.0.1:4318, not {endpoint!r}")
    return with_path(endpoint, "/v1/traces")


def with_path(address: str, usual: str) -> str:
    """An address with its usual path, or as given with a path of its own."""
    return address.rstrip("/") + usual if urlsplit(address).path in ("", "/") else address


def _check_backend(given: argparse.Namespace) -> None:
    if given.backend in WITH_UPSTREAM:
        if not _is_http(given.upstream):
            raise UsageError(f"--backend {given.backend} needs --upstream http://HOST:PORT of the inference server")
    elif given.upstream:
        raise UsageError("--upstream is for --backend openai and triton: leave it out, or choose one of them")
    if given.triton_metrics and not _is_http(given.triton_metrics):
        raise UsageError("--triton-metrics must be an address like http://127.0.0.1:8002/metrics")
    if given.dcgm_metrics and not (_is_http(given.dcgm_metrics) and given.upstream):
        raise UsageError("--dcgm-metrics must be an address like http://127.0.0.1:9400/metrics, beside --upstream")
    if given.dcgm_gpus and not given.dcgm_metrics:
        raise UsageError("--dcgm-gpus names GPUs of the page of --dcgm-metrics: give that too")
    if not given.triton_text_input or not given.triton_embedding_output:
        raise UsageError("--triton-text-input and --triton-embedding-output must be names of the model's tensors")
    if given.sim_batch_fixed < 0 or given.sim_batch_input < 0:
        raise UsageError("--sim-batch-fixed and --sim-batch-input must be 0 ms or more")


def _is_http(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "http" and bool(parts.hostname)


def _check_control_plane(url: str, *, insecure: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--control-plane must be a URL like https://flexband.example, not {url!r}")
    if parts.scheme == "http" and not insecure and not _is_loopback(parts.hostname):
        raise UsageError(
            f"--control-plane {url} would send reports in the clear: use https, or --insecure if the network is trusted"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address(text: str, option: str) -> Address:
    """HOST:PORT or [IPV6]:PORT. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535 or not host:
        raise UsageError(f"{option} must be HOST:PORT like 127.0.0.1:9001, not {text!r}")
    return Address(host=host.strip("[]"), port=int(port))
