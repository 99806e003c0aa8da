"""What terminals, files and pipes get."""

import io

import pytest

from kvcanary_agent.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, environ: dict[str, str]) -> str:
    screen = Screen(stream, environ)
    screen.heading("Heading")
    screen.progress(3, 4)
    screen.verdict(True, "good")
    screen.verdict(False, "bad")
    return stream.getvalue()


def test_a_terminal_gets_colours_and_a_bar() -> None:
    text = shown(Terminal(), {"TERM": "xterm"})

    assert "\x1b[1mHeading\x1b[0m\n" in text
    assert f"\r  [{'#' * 30}{'.' * 10}] 3 of 4" in text
    assert "  \x1b[1;32mok\x1b[0m  good\n" in text
    assert "  \x1b[1;31mFAILED\x1b[0m  bad\n" in text


def test_the_bar_is_gone_when_all_is_done() -> None:
    terminal = Terminal()
    Screen(terminal, {}).progress(4, 4)
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_no_color_keeps_the_bar() -> None:
    text = shown(Terminal(), {"NO_COLOR": "1"})

    assert "\x1b" not in text
    assert "\r  [" in text


@pytest.mark.parametrize(("stream", "environ"), [(io.StringIO(), {}), (Terminal(), {"TERM": "dumb"})])
def test_a_file_and_a_dumb_terminal_get_plain_lines(stream: io.StringIO, environ: dict[str, str]) -> None:
    assert shown(stream, environ) == "\nHeading\n  3 of 4\n  ok  good\n  FAILED  bad\n"


def test_without_a_terminal_progress_is_a_line_for_each_quarter() -> None:
    stream = io.StringIO()
    screen = Screen(stream, {})
    for done in range(1, 11):
        screen.progress(done, 10)
    assert stream.getvalue() == "  3 of 10\n  5 of 10\n  8 of 10\n  10 of 10\n"


def test_a_long_command_is_broken_so_that_a_shell_joins_it_again() -> None:
    stream = io.StringIO()
    words = ["A=1", "/a/long/path/" + "x" * 40 + "/python", "-m", "kvcanary_agent", "run", "a file.py"]
    Screen(stream, {}).command(words)

    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("  $ A=1 ")
    assert lines[0].endswith(" \\")
    assert lines[1].endswith("'a file.py'")


def test_paragraphs_and_fields_fit_80_columns_and_keep_words_whole() -> None:
    stream = io.StringIO()
    screen = Screen(stream, {})
    screen.paragraph("slot_mapping_disagrees-with-block_table " * 10)
    screen.field("cause", "slot_mapping_disagrees-with-block_table " * 10)

    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert stream.getvalue().split().count("slot_mapping_disagrees-with-block_table") == 20
