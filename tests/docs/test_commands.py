"""Each command of volseg that a page names is one: its verb is there, its options are, and its choices are taken."""

import re
from collections.abc import Sequence
from pathlib import Path

import typer.main
from documented import PAGES, commands_in, name_page, read_blocks

from volseg.cli import app

INLINE = re.compile(r"(?<!`)`(volseg [^`]+)`(?!`)", re.S)


def parse_alone() -> object:
    """Return the whole command line with verbs that do nothing."""

    def silence(command):
        command.callback = None
        for option in command.params:
            if option.callback is not None:  # that of --install-completion writes into this machine's shell
                option.callback = lambda context, _, value: context.exit() if value else value
        for verb in getattr(command, "commands", {}).values():
            silence(verb)
        return command

    return silence(typer.main.get_command(app))


ALONE = parse_alone()


def refused(words: Sequence[str], *, whole: bool = True) -> str:
    """Return what the command line says against a command, or nothing; what is not ``whole`` may lack what it needs."""
    numbered = ["2" if word in ("N", "K") else word for word in words]
    try:
        ALONE.main(args=numbered, standalone_mode=False, prog_name="volseg")
    except Exception as error:  # click's own, by whichever copy of it typer has
        if not whole and (type(error).__name__ == "MissingParameter" or "requires an argument" in str(error)):
            return ""
        return str(error)
    return ""


def refused_in(page: Path) -> list[str]:
    """Return the commands of a page that the command line would not take, in blocks and between words."""
    blocks = [block.text for block in read_blocks(page) if block.language in ("", "bash", "console", "sh", "text")]
    told = [(words, refused(words)) for text in blocks for words in commands_in(text)]
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in INLINE.findall(prose)]
    told += [(words, refused(words, whole=False)) for span in spans for words in commands_in(span)]
    return [f"volseg {' '.join(words)}: {message}" for words, message in told if message]


def test_the_command_line_takes_what_pages_type():
    told = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which names what there was
    assert {name_page(page): refused for page in told if (refused := refused_in(page))} == {}


def test_commands_that_are_none_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Not `volseg train --gone` but `volseg train --gpus N`.\n\n```\nvolseg trian CONFIG\n"
        "volseg train CONFIG \\\n  --gpus two\n```\n",
        encoding="utf-8",
    )
    found = [line.partition(": ")[0] for line in refused_in(page)]
    assert found == ["volseg trian CONFIG", "volseg train CONFIG --gpus two", "volseg train --gone"]
