"""Each variable's values, and what is said about a wrong one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.settings import Settings, SettingsError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environ({}) == Settings(
        enabled=False,
        mode="log",
        content="scrub",
        scrub_period=128,
        sweep_slots_per_step=16,
        adapters=(),
        incident_dir=None,
        status_dir=None,
        reveal_tokens=False,
    )


def test_every_variable_is_read() -> None:
    environ = {
        "KVCANARY_ENABLED": "yes",
        "KVCANARY_MODE": "raise",
        "KVCANARY_CONTENT": " FULL ",
        "KVCANARY_SCRUB_PERIOD": "1",
        "KVCANARY_SWEEP_SLOTS_PER_STEP": "0",
        "KVCANARY_ADAPTERS": "vllm, ./mine.py,/opt/theirs.py, package.module:Adapter",
        "KVCANARY_INCIDENT_DIR": "/var/log/kvcanary",
        "KVCANARY_STATUS_DIR": "status",
        "KVCANARY_REVEAL_TOKENS": "on",
        "OTEL_SERVICE_NAME": "of no concern",
    }
    assert Settings.from_environ(environ) == Settings(
        enabled=True,
        mode="raise",
        content="full",
        scrub_period=1,
        sweep_slots_per_step=0,
        adapters=("vllm", "./mine.py", "/opt/theirs.py", "package.module:Adapter"),
        incident_dir="/var/log/kvcanary",
        status_dir="status",
        reveal_tokens=True,
    )


def test_an_empty_variable_is_an_unset_one() -> None:
    names = ("ENABLED", "MODE", "CONTENT", "SCRUB_PERIOD", "SWEEP_SLOTS_PER_STEP", "ADAPTERS")
    assert Settings.from_environ({f"KVCANARY_{name}": " " for name in names}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("KVCANARY_ENABLED", "maybe", "accepted are 1, true, yes, on and 0, false, no, off"),
        ("KVCANARY_MODE", "warn", "accepted are log, raise"),
        ("KVCANARY_CONTENT", "all", "accepted are scrub, full, off"),
        ("KVCANARY_SCRUB_PERIOD", "0", "a whole number from 1"),
        ("KVCANARY_SCRUB_PERIOD", "1.5", "a whole number from 1"),
        ("KVCANARY_SCRUB_PERIOD", "1_0", "a whole number from 1"),
        ("KVCANARY_SCRUB_PERIOD", "9" * 5000, "a whole number from 1"),
        ("KVCANARY_SWEEP_SLOTS_PER_STEP", "-1", "a whole number from 0"),
        ("KVCANARY_ADAPTERS", "vlm", "vlm is not an adapter; accepted are "),
        ("KVCANARY_ADAPTERS", "vllm,mine.py", "mine.py must be given as an absolute path or start with ./"),
        ("KVCANARY_ADAPTERS", "engine.toml", "engine.toml must be given as an absolute path or start with ./"),
        ("KVCANARY_ADAPTERS", ":attribute", "not of the form package.module:attribute"),
        ("KVCANARY_ADAPTERS", "os.path:", "not of the form package.module:attribute"),
        ("KVCANARY_REVEAL_TOKENS", "2", "accepted are"),
    ],
)
def test_a_wrong_value_names_variable_value_and_remedy(variable: str, value: str, remedy: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ({variable: value})
    assert f"{variable}={value!r}" in str(caught.value)
    assert remedy in str(caught.value)


def test_a_misspelt_variable_is_met_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"KVCANARY_SCRUB_PERIODS is not a setting; did you mean .*_PERIOD\?"):
        Settings.from_environ({"KVCANARY_SCRUB_PERIODS": "3"})
    with pytest.raises(SettingsError, match="KVCANARY_XYZZY is not a setting; known are KVCANARY_ENABLED, "):
        Settings.from_environ({"KVCANARY_XYZZY": "3"})
    with pytest.raises(SettingsError, match=r"KVCANARY_mode is not a setting; did you mean KVCANARY_MODE\?"):
        Settings.from_environ({"KVCANARY_mode": "log"})


def test_in_a_child_process_each_wrong_value_is_one_message_and_the_default() -> None:
    settings, messages = Settings.tolerant(
        {"KVCANARY_MODE": "x", "KVCANARY_SCRUB_PERIOD": "y", "KVCANARY_CONTENT": "off", "KVCANARY_TYPO": "1"}
    )
    assert settings == Settings(content="off")
    assert len(messages) == 3


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["ENABLED", "MODE", "SCRUB_PERIOD", "ADAPTERS", "ODD"]), st.text(max_size=8)))
def test_no_value_raises_in_a_child_process(values: dict[str, str]) -> None:
    settings, messages = Settings.tolerant({f"KVCANARY_{name}": value for name, value in values.items()})
    assert isinstance(settings, Settings)
    assert len(messages) <= len(values)
