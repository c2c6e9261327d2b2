"""What mkdocs does not: pages made from the program, and links to the repository's files outside ``docs``.

A page has a comment ``<!-- made: NAME -->`` where something is put in, so that it can be linked to and read before.
"""

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main
from typer.cli import get_docs_for_click

from volseg.cli import app
from volseg.config.schema import ExperimentConfig

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
MADE = re.compile(r"<!-- made: ([a-z ]+) -->")

ELSEWHERE = "repository/"
"""Folder of the site for files of the repository that do not lie in ``docs``."""


def outside(page: Path) -> Iterator[Path]:
    """Yield the files outside ``docs`` that a page links to."""
    for _, target, _ in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        file = (page.parent / target).resolve()
        if ":" not in target and file.is_file() and ROOT in file.parents and ROOT / "docs" not in file.parents:
            yield file


def reached_files() -> set[Path]:
    """Return every file outside ``docs`` that a page links to, or a page so reached."""
    reached: set[Path] = set()
    waiting = sorted((ROOT / "docs").rglob("*.md"))
    while waiting:
        found = {*outside(waiting.pop())} - reached
        reached |= found
        waiting += [file for file in found if file.suffix == ".md"]
    return reached


def place_in_site(file: Path) -> str:
    """Return where a file of the repository lies in the site."""
    if file.is_relative_to(ROOT / "docs"):
        return file.relative_to(ROOT / "docs").as_posix()
    return ELSEWHERE + file.relative_to(ROOT).as_posix()


def place_in_repository(uri: str) -> Path:
    """Return the file that lies at a place of the site."""
    return ROOT / uri.removeprefix(ELSEWHERE) if uri.startswith(ELSEWHERE) else ROOT / "docs" / uri


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside ``docs`` that pages link to."""
    from mkdocs.structure.files import File  # not where the tests of the pages import this module

    for file in sorted(reached_files()):
        files.append(File.generated(config, place_in_site(file), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write what is made, and links as they stand in the site."""
    uri = page.file.src_uri
    source = place_in_repository(uri)

    def moved(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        file = (source.parent / target).resolve()
        if ":" in target or not file.exists() or ROOT not in file.parents:
            return match.group()
        if file.is_dir():
            file = file / "README.md"
        return before + posixpath.relpath(place_in_site(file), posixpath.dirname(uri) or ".") + after

    markdown = MADE.sub(lambda match: MAKERS[match[1]](), markdown)
    parts, blocks = FENCED.split(markdown), FENCED.findall(markdown)
    # GitHub shows whatever stands behind the language of a block; here it is its title.
    blocks = [re.sub(r"\A```(\w+) (\S+)$", r'```\1 title="\2"', block, flags=re.M) for block in blocks]
    texts = [LINK.sub(moved, part) for part in parts]
    return "".join(piece for pair in zip(texts, [*blocks, ""], strict=True) for piece in pair)


def make_command_line() -> str:
    """Return every verb that is shown with its arguments and options, as typer documents them."""
    command = typer.main.get_command(app)
    shown = {name: verb for name, verb in command.commands.items() if not verb.hidden}
    texts = []
    for name, verb in shown.items():
        context = typer.Context(verb, info_name=f"volseg {name}")
        texts.append(get_docs_for_click(obj=verb, ctx=context, indent=1, name=name, call_prefix="volseg"))
    return "\n".join(texts)


def make_config() -> str:
    """Return a table of keys for each section of the config."""
    schema = ExperimentConfig.model_json_schema()
    keys = {definition: key for key, part in schema["properties"].items() for definition in definitions_in(part)}
    parts = [("The whole", schema)]
    parts += [(f"`{keys[name]}`" if name in keys else name, part) for name, part in schema["$defs"].items()]
    return "\n\n".join(describe_section(title, part) for title, part in parts if "properties" in part)


def definitions_in(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a part of a JSON schema refers to."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for part in schema.values():
            yield from definitions_in(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from definitions_in(part)


def describe_section(title: str, schema: dict[str, Any]) -> str:
    """Return heading, description and table of a section."""
    rows = ["| key | takes | default | |", "| --- | --- | --- | --- |"]
    for key, part in schema["properties"].items():
        value = f"`{json.dumps(part['default'])}`" if "default" in part and "$ref" not in part else "its own"
        default = "required" if key in schema.get("required", ()) else value
        cells = (f"`{key}`", describe_type(part), default, part.get("description", ""))
        rows.append("| " + " | ".join(" ".join(cell.replace("``", "`").split()) for cell in cells) + " |")
    more = "\n\nIts other keys are parameters of the component." if schema.get("additionalProperties") is True else ""
    return f"## {title}\n\n{schema.get('description', '')}{more}\n\n" + "\n".join(rows)


BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}


def describe_type(schema: dict[str, Any]) -> str:
    """Return in words what a key takes."""
    if "anyOf" in schema:
        return ", or ".join(describe_type(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return "a section"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} of: {describe_type(schema['prefixItems'][0])}"
    if schema.get("type") == "array":
        return f"a list of: {describe_type(schema.get('items', {}))}"
    names = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "object": "a mapping",
        "null": "`null`",
    }
    kind = {**names, "boolean": "`true`, `false`"}.get(schema.get("type", ""), "anything")
    kind = "a path" if schema.get("format") == "path" else kind
    bounds = [words.format(schema[key]) for key, words in BOUNDS.items() if key in schema and schema[key] < 2**31]
    return " ".join([kind, *bounds])


MAKERS: dict[str, Callable[[], str]] = {"command line": make_command_line, "config": make_config}
