"""Flags win over environment, environment over defaults; bad values are refused by name."""

import pytest

from shared.config import DetokenizerConfig, SchedulerConfig, TokenizerConfig, WorkerConfig, load


def test_defaults_environment_flags() -> None:
    assert load(SchedulerConfig, [], {}).page_size == 16
    environ = {"RADIXFLEET_PAGE_SIZE": "32", "RADIXFLEET_DISABLE_RADIX_CACHE": "true"}
    config = load(SchedulerConfig, [], environ)
    assert config.page_size == 32
    assert config.disable_radix_cache is True
    assert load(SchedulerConfig, ["--page-size", "8"], environ).page_size == 8
    assert load(SchedulerConfig, ["--no-disable-radix-cache"], environ).disable_radix_cache is False


def test_other_services_variables_are_ignored() -> None:
    assert load(DetokenizerConfig, [], {"RADIXFLEET_PORT": "1"}).bind


@pytest.mark.parametrize(
    ("kind", "environ", "word"),
    [
        (SchedulerConfig, {"RADIXFLEET_PAGE_SIZE": "0"}, "page_size"),
        (SchedulerConfig, {"RADIXFLEET_SCHEDULE_POLICY": "magic"}, "schedule_policy"),
        (WorkerConfig, {"RADIXFLEET_MEM_FRACTION_STATIC": "1.5"}, "mem_fraction_static"),
        (TokenizerConfig, {"RADIXFLEET_PORT": "many"}, "port"),
    ],
)
def test_bad_values_name_the_field(kind: type, environ: dict[str, str], word: str) -> None:
    with pytest.raises(SystemExit, match=word):
        load(kind, [], environ)


def test_unknown_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(SchedulerConfig, ["--no-such-flag", "1"], {})
    assert "no-such-flag" in capsys.readouterr().err
