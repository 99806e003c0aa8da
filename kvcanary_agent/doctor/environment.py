"""What this Python environment offers: engines, ways in for the agent, exporters. Nothing of it is imported here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from kvcanary_agent import builtin_targets, entry_point_adapters
from kvcanary_agent.activation import site_door
from kvcanary_agent.activation.launcher import LaunchError, instrumented
from kvcanary_agent.settings import Settings

PROBE_TIMEOUT_S = 180.0
_ENTRY_POINTS = ("opentelemetry_instrumentor", "vllm.general_plugins", "sglang.srt.plugins")
_SIGNALS = ("traces", "metrics", "logs")
_OTLP_MODULES = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}

_NONE_HERE = "none of the modules that the adapter patches is here: another version of the engine"

# Run in a process of its own: it imports the engine, as its server would.
_PROBE = """
import importlib, json, os, sys
import kvcanary_agent
kvcanary_agent.install()
errors, targets = {}, sys.argv[1:]
own = os.environ.get("KVCANARY_ADAPTERS", "")
if own:
    from kvcanary_agent.activation.adapter_loading import load
    try:
        targets = [target for adapter in load(own) for target in adapter.targets]
    except BaseException as error:
        errors[own] = f"{type(error).__name__}: {error}"[:300]
for target in targets:
    try:
        importlib.import_module(target)
    except BaseException as error:
        errors[target] = f"{type(error).__name__}: {error}"[:300]
tallies = getattr(sys.modules.get("kvcanary_agent.runtime"), "telemetry", None)
patches, missing = {}, {}
if tallies is not None:
    tallies = tallies().tallies
    patches = {name: outcome for (_, name), outcome in tallies.patches.items()}
    missing = {subject: reason for (_, _, subject), (covered, reason) in tallies.coverage.items() if not covered}
os.write(int(os.environ["KVCANARY_DOCTOR_PIPE"]), json.dumps([targets, errors, patches, missing]).encode())
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """An engine that is installed here.

    Attributes:
        name, version: Of the package.
        targets: Each module that an adapter patches: whether the engine has it.
        patches: Class -> outcome, of an import in a process of its own; empty if it was not tried.
        problems: Why something is not covered, each a sentence.
    """

    name: str
    version: str
    targets: dict[str, bool]
    patches: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def covered(self) -> bool:
        """Whether a class was patched, and none refused."""
        return bool(self.patches) and set(self.patches.values()) == {"patched"}


def engines() -> list[EngineReport]:
    """The engines that are installed and that an adapter knows, each imported once, in a process of its own."""
    by_package: dict[str, list[str]] = {}
    for target in builtin_targets():
        package = target.partition(".")[0]
        if package != "kvcanary_agent":
            by_package.setdefault(package, []).append(target)
    reports = []
    for package, targets in by_package.items():
        folder = _folder_of(package)
        if folder is None:
            continue
        present = {target: _has_module(folder, target) for target in targets}
        here = [target for target in targets if present[target]]
        _, patches, problems = _probe(here) if here else ([], {}, [_NONE_HERE])
        reports.append(
            EngineReport(name=package, version=_version(package), targets=present, patches=patches, problems=problems)
        )
    return reports


def own_adapters(environ: Mapping[str, str]) -> list[EngineReport]:
    """The adapters that a user has added, by ``KVCANARY_ADAPTERS`` or entry points: each loaded, and what it waits for
    imported, in a process of its own."""
    settings, _ = Settings.tolerant({"KVCANARY_ADAPTERS": environ.get("KVCANARY_ADAPTERS", "")})
    entries = [entry for entry in settings.adapters if ":" in entry or entry.endswith((".py", ".toml"))]
    if not settings.adapters:
        entries = sorted({str(entry) for found in entry_point_adapters().values() for entry in found})
    reports = []
    for entry in entries:
        targets, patches, problems = _probe([], entry)
        failed = [target for target in targets if any(problem.startswith(f"{target} ") for problem in problems)]
        reports.append(
            EngineReport(
                name=entry,
                version="(own adapter)",
                targets={target: target not in failed for target in targets},
                patches=patches,
                problems=problems,
            )
        )
    return reports


def _folder_of(package: str) -> Path | None:
    spec = PathFinder.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _has_module(folder: Path, target: str) -> bool:
    path = folder.joinpath(*target.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _probe(targets: list[str], own: str = "") -> tuple[list[str], dict[str, str], list[str]]:
    """Import `targets`, or those of the user's `own` adapter: which those are, the outcome for each class, problems."""
    read, write = os.pipe()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY_", "OTEL_"))},
        "KVCANARY_DOCTOR_PIPE": str(write),
        **({"KVCANARY_ADAPTERS": own} if own else {}),
        "PYTHONPATH": os.pathsep.join([_root(), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    try:
        with open(read, "rb") as pipe:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROBE, *targets],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[write],
            )
            os.close(write)
            try:
                _, said = process.communicate(timeout=PROBE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                return targets, {}, [f"its import did not end within {PROBE_TIMEOUT_S:.0f} s"]
            answer = pipe.read()
    except OSError as error:
        return targets, {}, [f"it could not be imported in another process: {error}"]
    if not answer:
        last = (said.decode(errors="replace").strip().splitlines() or ["without a word"])[-1]
        return targets, {}, [f"its import ended the process (status {process.returncode}): {last}"]
    targets, errors, patches, missing = json.loads(answer)
    problems = [f"{target} cannot be imported: {error}" for target, error in errors.items() if target != own]
    problems += [f"it cannot be loaded: {error}" for target, error in errors.items() if target == own]
    problems += [f"{subject}: {reason}" for subject, reason in missing.items()]
    return targets, patches, problems


def _root() -> str:
    import kvcanary_agent

    return str(Path(kvcanary_agent.__path__[0]).parent)


def doors(environ: Mapping[str, str]) -> dict[str, str]:
    """Each way in: ``""`` if it works, otherwise why not."""
    found = {"kvcanary-agent run": "", "environment variables": ""}
    try:
        prepared = instrumented(environ)
        look = "import sys; print(any(type(f).__name__ == 'TargetFinder' for f in sys.meta_path))"
        result = subprocess.run(
            [sys.executable, "-c", look], env=prepared, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
        if result.stdout.strip() != "True":
            words = (result.stderr.strip().splitlines() or ["another sitecustomize comes before the agent's"])[-1]
            found["kvcanary-agent run"] = found["environment variables"] = words
    except (LaunchError, OSError, subprocess.TimeoutExpired) as error:
        found["kvcanary-agent run"] = found["environment variables"] = str(error)
    for group in _ENTRY_POINTS:
        here = any(point.value.startswith("kvcanary_agent") for point in metadata.entry_points(group=group))
        found[group] = "" if here else "kvcanary-agent is not installed in this environment"
    found["enable --site"] = _site_door()
    return found


def _site_door() -> str:
    try:
        is_open = site_door.is_open(sysconfig.get_path("purelib"))
    except site_door.SiteDoorError as error:
        return str(error)
    return "" if is_open else "closed; kvcanary-agent enable --site opens it"


def exporters(environ: Mapping[str, str]) -> dict[str, str]:
    """What each signal is exported through, in words."""
    return {signal: _exporter(signal, environ) for signal in _SIGNALS}


def _exporter(signal: str, environ: Mapping[str, str]) -> str:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "nothing: OTEL_SDK_DISABLED is true"
    named = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    if not named and not any(environ.get(endpoint, "").strip() for endpoint in endpoints):
        return f"nothing: neither OTEL_{signal.upper()}_EXPORTER nor OTEL_EXPORTER_OTLP_ENDPOINT is set"
    words = []
    for name in (named or "otlp").split(","):
        registered = name.strip()
        if registered == "otlp":
            protocol = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "").strip()
            protocol = protocol or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip() or "grpc"
            registered = _OTLP_MODULES.get(protocol, protocol)
        if registered == "none":
            words.append("nothing: none is asked for")
        elif any(metadata.entry_points(group=f"opentelemetry_{signal}_exporter", name=registered)):
            words.append(registered)
        else:
            words.append(f"nothing: the exporter {registered!r} is not installed")
    return ", ".join(words)


def setting_problems(environ: Mapping[str, str]) -> list[str]:
    return Settings.tolerant(environ)[1]
