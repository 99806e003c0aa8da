"""What the user can set, read from the environment: every ``KVCANARY_*`` variable, its values and its default."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

_PREFIX = "KVCANARY_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

Mode = Literal["log", "raise"]
Content = Literal["scrub", "full", "off"]
OnViolation = Literal["report", "evict"]


class SettingsError(ValueError):
    """A variable whose value cannot be used. The message names the variable, the value and what is accepted."""


DRILLS = ("content", "idle_block", "nonfinite", "block_table_swap", "foreign_block", "slot_mapping", "lost_write")
"""The faults that a drill can inject, see `kvcanary_agent.faults.drills`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One fault to inject, once, in the first step from `step` on in which it can strike.

    kind: one of `DRILLS`.
    seed: of the random choice of where it strikes.
    confirmed: whether it may be injected in raise mode, where it fails a step.
    """

    kind: str
    step: int
    seed: int = 0
    confirmed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one process. An empty variable is an unset one."""

    enabled: bool = False
    """KVCANARY_ENABLED: whether the environment-variable door is open."""
    mode: Mode = "log"
    """KVCANARY_MODE: ``log`` reports a violation; ``raise`` also fails the step before its output is used."""
    content: Content = "scrub"
    """KVCANARY_CONTENT: how the bytes of the slots read are checked: a rotating share, all in each step, or none."""
    on_violation: OnViolation = "report"
    """KVCANARY_ON_VIOLATION: ``evict`` also takes a block that was found corrupt out of the engine's prefix cache."""
    scrub_period: int = 128
    """KVCANARY_SCRUB_PERIOD: steps within which ``scrub`` has checked every byte that is read; at least 1."""
    sweep_slots_per_step: int = 16
    """KVCANARY_SWEEP_SLOTS_PER_STEP: idle cached slots checked in each step; 0 checks none."""
    adapters: tuple[str, ...] = ()
    """KVCANARY_ADAPTERS: the adapters to use, see `kvcanary_agent.activation.adapter_loading`; empty: all built in."""
    incident_dir: str | None = None
    """KVCANARY_INCIDENT_DIR: the folder for incident files; None writes none."""
    status_dir: str | None = None
    """KVCANARY_STATUS_DIR: the folder for status files, see `kvcanary_agent.doctor`; None writes none."""
    reveal_tokens: bool = False
    """KVCANARY_REVEAL_TOKENS: whether reports carry token ids in clear rather than as keyed hashes."""

    drill: Drill | None = None
    """KVCANARY_DRILL: a fault to inject, ``kind@step[,seed=N][,confirm]``; None injects nothing."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Settings":
        """Read `environ`. Raises `SettingsError` at the first variable that is wrong or unknown."""
        settings, messages = cls.tolerant(environ)
        if messages:
            raise SettingsError(messages[0])
        return settings

    @classmethod
    def tolerant(cls, environ: Mapping[str, str]) -> "tuple[Settings, list[str]]":
        """Read `environ` where nobody can correct it any more: a wrong value counts as unset, and is one message."""
        values: dict[str, Any] = {}
        messages = []
        for variable, text in sorted(environ.items()):
            if not variable.startswith(_PREFIX):
                continue
            field = variable.removeprefix(_PREFIX).lower()
            if variable != variable.upper() or field not in _PARSERS:
                messages.append(_unknown(variable))
                continue
            if not text.strip():
                continue
            try:
                values[field] = _PARSERS[field](text.strip())
            except SettingsError as error:
                messages.append(f"{variable}={text!r}: {error}")
        drill = values.get("drill")
        if drill is not None and values.get("mode") == "raise" and not drill.confirmed:
            del values["drill"]
            messages.append(
                f"KVCANARY_DRILL={environ['KVCANARY_DRILL']!r}: with KVCANARY_MODE=raise a drill fails a step of the "
                "server; append ,confirm if that is what you want"
            )
        return cls(**values), messages


def _unknown(variable: str) -> str:
    import difflib

    # Compared without the prefix, which would make any two names alike.
    suffixes = [field.upper() for field in _PARSERS]
    nearest = difflib.get_close_matches(variable.removeprefix(_PREFIX).upper(), suffixes, n=1)
    hint = (
        f"did you mean {_PREFIX}{nearest[0]}?"
        if nearest
        else f"known are {', '.join(_PREFIX + suffix for suffix in suffixes)}"
    )
    return f"{variable} is not a setting; {hint}"


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise SettingsError("accepted are 1, true, yes, on and 0, false, no, off")


_Choice = TypeVar("_Choice", bound=str)


def _one_of(*choices: _Choice) -> Callable[[str], _Choice]:
    def parse(text: str) -> _Choice:
        for choice in choices:
            if text.lower() == choice:
                return choice
        raise SettingsError(f"accepted are {', '.join(choices)}")

    return parse


_LARGEST = 10**9


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if re.fullmatch("[0-9]{1,10}", text) and minimum <= int(text) <= _LARGEST:
            return int(text)
        raise SettingsError(f"accepted is a whole number from {minimum} to {_LARGEST}")

    return parse


def _adapters(text: str) -> tuple[str, ...]:
    entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
    for entry in entries:
        _check_adapter(entry)
    return entries


def _check_adapter(entry: str) -> None:
    if entry.endswith((".py", ".toml")):
        if not entry.startswith(("/", "./", "../")):
            raise SettingsError(f"the file {entry} must be given as an absolute path or start with ./")
        return
    if ":" in entry:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", entry):
            raise SettingsError(f"{entry} is not of the form package.module:attribute")
        return
    from kvcanary_agent.adapters.targets import BUILTIN

    builtin = sorted({module.rpartition(".")[2] for module in BUILTIN.values()})
    if entry not in builtin:
        raise SettingsError(
            f"{entry} is not an adapter; accepted are {', '.join(builtin)}, a file (/path/to/adapter.py, "
            "./adapter.py, ./engine.toml), or package.module:attribute"
        )


def _drill(text: str) -> Drill:
    match = re.fullmatch(r"([a-z_]+)@([0-9]{1,10})((?:,[^,]*)*)", text)
    if match is None:
        raise SettingsError("accepted is kind@step, for example content@200, then optionally ,seed=7 and ,confirm")
    kind, step, options = match[1], int(match[2]), match[3].split(",")[1:]
    if kind not in DRILLS:
        raise SettingsError(f"there is no drill {kind!r}; accepted are {', '.join(DRILLS)}")
    if step < 1:
        raise SettingsError("the first step is 1")
    seed, confirmed = 0, False
    for option in options:
        if option == "confirm":
            confirmed = True
        elif re.fullmatch("seed=[0-9]{1,18}", option):
            seed = int(option.removeprefix("seed="))
        else:
            raise SettingsError(f"{option!r} is no option of a drill; accepted are seed=N and confirm")
    return Drill(kind=kind, step=step, seed=seed, confirmed=confirmed)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "enabled": _boolean,
    "mode": _one_of("log", "raise"),
    "content": _one_of("scrub", "full", "off"),
    "on_violation": _one_of("report", "evict"),
    "scrub_period": _at_least(1),
    "sweep_slots_per_step": _at_least(0),
    "adapters": _adapters,
    "incident_dir": str,
    "status_dir": str,
    "reveal_tokens": _boolean,
    "drill": _drill,
}
